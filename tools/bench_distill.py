"""Time and memory of the fused distillation against materialised logits and against one pass at a time.

    python tools/bench_distill.py            # the shapes of the claims: many minutes, 16 GB for one row
    python tools/bench_distill.py --quick    # tiny shapes, under a minute
    python tools/bench_distill.py --json rows.json --objective lk --only time

Three ways to the same loss and gradients, forward and backward, in fp32:

    fused      distill_loss: teacher once per chunk, K passes, gradients in the same sweep, metrics included
    unfused    whole logits of the teacher (once) and of every pass, log_softmax, autograd; no metrics
    separate   distill_loss once for each pass, so that the teacher is computed K times

Columns: T, V, Vd, E, K, objective; peak_bytes (most bytes that the fused call allocates at one time, its
gradients counted), peak_ratio (unfused over fused), time_ratio_unfused and time_ratio_separate (their seconds
over the fused seconds: above 1 the fused call is faster), max_rel_err (largest relative error of a gradient
against the unfused one), seconds (fused), matmul_share (rate of the head-sized products in the fused call over
the rate of one plain product of that size: how near the call is to doing nothing else). Times are medians of
runs that alternate between the ways. An empty cell was not asked for. ``--clock cpu`` counts the process's CPU
seconds instead of the wall's: for a machine that others use too, with ``--threads 1``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torchspec.losses.distill import distill_loss
from torchspec.losses.objectives import OBJECTIVES

COLUMNS = (
    *("T", "V", "Vd", "E", "K", "objective", "peak_bytes", "peak_ratio"),
    *("time_ratio_unfused", "time_ratio_separate", "max_rel_err", "seconds", "matmul_share"),
)


class Problem:
    """Random inputs of one shape: a document of T rows, every row trained."""

    clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        rows: int,
        vocab: int,
        draft: int,
        width: int,
        passes: int,
        objective: str,
        chunk: int,
        device: str,
    ):
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(device)

        self.shape = dict(T=rows, V=vocab, Vd=draft, E=width, K=passes, objective=objective)
        self.teacher, self.teacher_head = normal(rows, width), normal(vocab, width) * width**-0.5
        self.hidden = [normal(rows, width).requires_grad_() for _ in range(passes)]
        self.head = (normal(draft, width) * width**-0.5).requires_grad_()
        ids = torch.arange(draft) * (vocab // draft)
        self.d2t = (ids - torch.arange(draft)).to(device) if draft != vocab else None
        self.ids = ids.to(device)
        self.targets = self.ids[torch.randint(draft, (rows,), generator=g).to(device)]
        self.anchors = torch.full((passes, rows), -1, device=device)
        for k in range(passes):
            self.anchors[k, 1 + k : rows - 1] = torch.arange(rows - 2 - k, device=device)
        self.counts = (self.anchors >= 0).sum(1)
        self.chunk = chunk

    def _distill(self, passes: slice, counts: Tensor) -> Tensor:
        return distill_loss(
            self.teacher,
            self.teacher_head,
            self.hidden[passes],
            self.head,
            self.anchors[passes],
            counts,
            objective=self.shape["objective"],
            d2t=self.d2t,
            target_ids_R=self.targets,
            chunk_rows=self.chunk,
        ).loss

    def fused(self) -> None:
        self._distill(slice(None), self.counts).backward()

    def separate(self) -> None:
        total = self.counts.sum()[None]
        for k in range(len(self.hidden)):
            self._distill(slice(k, k + 1), total).backward()

    def unfused(self) -> None:
        rows = self.teacher.shape[0]
        with torch.no_grad():
            logp = F.log_softmax(
                (self.teacher @ self.teacher_head.T)[:, self.ids if self.d2t is not None else slice(None)], -1
            )
        loss = 0.0
        for k, hidden in enumerate(self.hidden):
            logq = F.log_softmax(hidden[: rows - 2 - k] @ self.head.T, -1)
            loss = loss + self._row_losses(logp[1 + k : rows - 1], logq, self.targets[1 + k : rows - 1])
        (loss / self.counts.sum()).backward()

    def _row_losses(self, logp: Tensor, logq: Tensor, targets: Tensor) -> Tensor:
        objective = self.shape["objective"]
        if objective == "forward_kl":
            return -(logp.exp() * logq).sum()
        if objective == "reverse_kl":
            return F.kl_div(logp, logq, reduction="sum", log_target=True)
        if objective == "jsd":
            logm = torch.logaddexp(logp, logq) - torch.log(torch.tensor(2.0))
            return sum(F.kl_div(logm, x, reduction="sum", log_target=True) for x in (logp, logq)) / 2
        if objective == "hard_ce":
            return F.nll_loss(logq, torch.searchsorted(self.ids, targets), reduction="sum")
        alpha = torch.minimum(logp, logq).exp().sum(-1)
        if objective == "lk":
            return -alpha.log().sum()
        if objective == "tv":
            return (1 - alpha).sum()
        weight = torch.exp(-3 * alpha.detach())
        return (weight * (logp.exp() * (logp - logq)).sum(-1) + (1 - weight) * (1 - alpha)).sum()

    def gradients(self, way: str) -> list[Tensor]:
        self.clear()
        getattr(self, way)()
        return [x.grad for x in (*self.hidden, self.head)]

    def clear(self) -> None:
        for x in (*self.hidden, self.head):
            x.grad = None

    def seconds(self, way: str) -> float:
        self.clear()
        self._wait()
        start = self.clock()
        getattr(self, way)()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.head.is_cuda:
            torch.cuda.synchronize()

    def peak_bytes(self, way: str) -> int:
        """Most bytes alive at one time during the call, beyond its inputs."""
        self.clear()
        if self.head.is_cuda:
            self._wait()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            getattr(self, way)()
            self._wait()
            return torch.cuda.max_memory_allocated() - before
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
            getattr(self, way)()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        memory = sorted(
            (e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"
        )
        return max(total for _, total, _ in memory) - (memory[0][1] - memory[0][2])

    def matmul_seconds(self, repeats: int) -> float:
        """Seconds of the fused call's head-sized products, at the rate of a plain product of one chunk."""
        rows, vocab, draft, passes = (self.shape[name] for name in ("T", "V", "Vd", "K"))
        n = min(self.chunk, rows)
        hidden, out = self.teacher[:n], torch.empty(n, vocab, device=self.teacher.device)

        def once() -> float:
            self._wait()
            start = self.clock()
            torch.mm(hidden, self.teacher_head.T, out=out)
            self._wait()
            return self.clock() - start

        once()
        each = statistics.median(once() for _ in range(repeats))
        return each * (rows / n) * (1 + 3 * passes * draft / vocab)


def relative_error(ours: list[Tensor], reference: list[Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, reference))


def measure(problem: Problem, repeats: int, what: str) -> dict:
    row = dict.fromkeys(COLUMNS) | problem.shape
    if what in ("all", "memory"):
        row["peak_bytes"] = problem.peak_bytes("fused")
        row["peak_ratio"] = problem.peak_bytes("unfused") / row["peak_bytes"]
    if what in ("all", "time"):
        ours = [g.clone() for g in problem.gradients("fused")]
        row["max_rel_err"] = relative_error(ours, problem.gradients("unfused"))
        times: dict[str, list[float]] = {"fused": [], "unfused": [], "separate": []}
        for _ in range(repeats):
            for way, seconds in times.items():
                seconds.append(problem.seconds(way))
        # The ratio of each round, then the median: a slow minute of the machine hits all ways of its round.
        for way in ("unfused", "separate"):
            row[f"time_ratio_{way}"] = statistics.median(b / a for a, b in zip(times["fused"], times[way]))
        row["seconds"] = statistics.median(times["fused"])
        row["matmul_share"] = problem.matmul_seconds(max(repeats, 3)) / row["seconds"]
    return row


def shapes(args: argparse.Namespace) -> list[tuple[str, dict]]:
    """(what to measure, shape)"""
    if args.rows:
        return [
            (
                args.only,
                dict(
                    rows=args.rows,
                    vocab=args.vocab,
                    draft=args.draft_vocab or args.vocab,
                    width=args.width,
                    passes=args.passes,
                ),
            )
        ]
    if args.quick:
        base = dict(rows=512, vocab=8192, width=64)
        return [(args.only, base | dict(draft=draft, passes=passes)) for passes in (1, 3) for draft in (8192, 2048)]
    base = dict(vocab=49152, width=576, passes=3)
    plan = [
        ("time", base | dict(rows=4096, draft=49152)),
        ("time", base | dict(rows=4096, draft=12288)),
        ("memory", base | dict(rows=8192, draft=49152)),
    ]
    return [(what, shape) for what, shape in plan if args.only in ("all", what)]


def text(value) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as a list of objects")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, under a minute on two cores")
    parser.add_argument("--only", choices=("all", "time", "memory"), default="all")
    parser.add_argument("--objective", choices=[*sorted(OBJECTIVES), "all"], default="forward_kl")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk-rows", type=int, default=0, help="0 takes 1024, or 64 with --quick")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=0, help="one shape of your own: T (with the next four)")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--draft-vocab", type=int, default=0)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    Problem.clock = staticmethod(time.perf_counter if args.clock == "wall" else time.process_time)
    if args.threads:
        torch.set_num_threads(args.threads)
    chunk = args.chunk_rows or (64 if args.quick else 1024)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.device}, chunk of {chunk} rows, "
        f"medians of {args.repeats}, {args.clock} clock",
        flush=True,
    )
    print(" | ".join(COLUMNS), flush=True)
    rows = []
    for objective in sorted(OBJECTIVES) if args.objective == "all" else [args.objective]:
        for what, shape in shapes(args):
            rows.append(
                measure(Problem(**shape, objective=objective, chunk=chunk, device=args.device), args.repeats, what)
            )
            print(" | ".join(text(rows[-1][name]) for name in COLUMNS), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
