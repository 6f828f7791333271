"""What context parallelism costs: bytes on the wire, balance, memory, exactness; and its attention's time.

    python tools/bench_context_parallel.py [--quick] [--only counts] [--json FILE] [--device cuda]
                                           [--flops-per-s 4e14] [--link-gb-per-s 50]

Table "counts": real gloo ranks run the K-pass unroll of one draft layer; bytes are counted at the
collectives, errors are against the dense fp64 oracle.  wire_units: bytes that one rank sends per layer and
microbatch, in units of its K0 + V0 in bf16.  paper_units: the same for the ring of arXiv 2609.07108,
K (2(C-1) + 2C).  automodel_units: for NeMo Automodel's zigzag ring, which expands keys to the query heads,
K (8C-4) / 2 * H / Hkv.

Table "kernel": one device computes what each rank of C would (one pass, forward and backward; ring and gather
are emulated by the shapes of their pieces): time and achieved FLOP/s of the slowest rank.  On a CPU the shapes
are small; with ``--device cuda`` the same code runs at 32K-256K tokens in bf16.  The CUDA path has not been run.

Table "prediction": strong scaling of one layer of a draft at 256K tokens, 32 query and 8 key/value heads of 128.
Its seconds are computed, not measured: the slowest rank's FLOPs over a rate, plus bytes over the link, nothing
overlapped.  The rate is the kernel's of the table above where that has 256K tokens; on a CPU it is that of C = 1 at
the most tokens, in fp32 (there the chunks of a larger C are too small to speak for 256K, where they are no smaller
than that); or it is what you give with ``--flops-per-s``.  ``rate_from`` says which.

Legend: C ranks, K passes, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from torchspec.attention.oracle import DenseTrunk
from torchspec.attention.view import FULL, TrunkView, visible_pairs
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.trunk import Trunk
from torchspec.context_parallel.wire import WireCounter

LENGTHS = [130, 1, 222, 71]
HEADS, GROUPS, DIM = 8, 2, 16
MODEL_TOKENS, MODEL_HEADS = 262144, (32, 8, 128)
TIMEOUT = datetime.timedelta(seconds=120)
DEADLINE_S = 600


# ---- table "counts"
# --------------------------------------------------------------------------------------------------


def leaves(passes: int) -> list[list[torch.Tensor]]:
    """Per pass q, k, v and the weight of its output: fp64, the whole pack."""
    generator = torch.Generator().manual_seed(passes)
    return [
        [
            torch.randn(sum(LENGTHS), h, DIM, generator=generator, dtype=torch.float64)
            for h in (HEADS, GROUPS, GROUPS, HEADS)
        ]
        for _ in range(passes)
    ]


def unroll(trunk, passes) -> list[torch.Tensor]:
    """Outputs and the gradients of every q, k, v; pass k's query depends on pass k-1's output."""
    inputs = [x.detach().requires_grad_() for p in passes for x in p[:3]]
    outs, loss, previous = [], 0.0, 0.0
    for index, p in enumerate(passes):
        q, k, v = inputs[3 * index : 3 * index + 3]
        previous = trunk.attend(q + 0.1 * previous, k, v)
        loss = loss + (previous * p[3]).sum()
        outs.append(previous.detach())
    return [*outs, *torch.autograd.grad(loss, inputs)]


def saved_bytes(trunk, passes) -> list[int]:
    """Bytes that each pass adds to what is saved for the backward: this rank's, every storage once."""
    storages: dict[int, int] = {}
    keep, totals = [], []

    def pack(x):
        local = getattr(x, "_local_tensor", x)
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        keep.append(local)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for q, k, v, _ in passes:
            keep.append(trunk.attend(*(x.detach().requires_grad_() for x in (q, k, v))))
            totals.append(sum(storages.values()))
    return [b - a for a, b in zip([0, *totals], totals)]


def count(mesh, transport: str, passes: int) -> dict:
    """One row's raw material on one rank."""
    layout = PackedZigzag(LENGTHS, cp_mesh=mesh, trunk_transport=transport)
    shard = lambda dtype: [[layout.shard(x).to(dtype) for x in p] for p in leaves(passes)]  # noqa: E731
    unit = layout.num_tokens * 2 * GROUPS * DIM * torch.bfloat16.itemsize
    half = shard(torch.bfloat16)
    with WireCounter(mesh.size(), mesh.get_local_rank()) as counter:
        unroll(Trunk(layout), half)
    return {
        "wire_units": counter.bytes / unit,
        "saved": saved_bytes(Trunk(layout), half),
        "fp32": unroll(Trunk(layout), shard(torch.float32)),
        "num_tokens": layout.num_tokens,
    }


def rank_main(rank: int, size: int, folder: str, cases: list) -> None:
    """One spawned rank: all cases, results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    torch.save([count(mesh, *case) for case in cases], f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def balance(size: int, window: int) -> float:
    """max / mean over ranks of the attending pairs."""
    work = []
    for rank in range(size):
        layout = PackedZigzag(LENGTHS, cp_size=size, cp_rank=rank)
        view = TrunkView(layout.cu_seqlens, layout.max_seqlen, window, size, rank, FULL)
        work.append(visible_pairs(view, layout.num_tokens, layout.num_tokens_global))
    return max(work) / (sum(work) / size)


def worst_error(found: list[dict], expected: list[torch.Tensor]) -> float:
    """Largest relative error by norm over outputs and gradients, put together from the ranks' rows."""
    layout = PackedZigzag(LENGTHS, cp_size=len(found))
    errors = []
    for index, want in enumerate(expected):
        got = layout.unshard([f["fp32"][index] for f in found]).double()
        errors.append(float((got - want).norm() / want.norm()))
    return max(errors)


def count_rows(sizes: list[int], passes: list[int]) -> list[dict]:
    """The table of counts."""
    rows = []
    cases = [(transport, k) for transport in ("gather", "ring") for k in passes]
    expected = {k: unroll(DenseTrunk(PackedZigzag(LENGTHS)), leaves(k)) for k in passes}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            end = time.monotonic() + DEADLINE_S
            ranks = mp.spawn(rank_main, (size, folder, cases), nprocs=size, join=False)
            while not ranks.join(timeout=1.0):  # raises what a rank raised
                if time.monotonic() > end:
                    for process in ranks.processes:
                        process.kill()
                    raise TimeoutError(f"{size} ranks were not done after {DEADLINE_S} s.")
            ranks = [torch.load(f"{folder}/{rank}") for rank in range(size)]
        for index, (transport, k) in enumerate(cases):
            found = [r[index] for r in ranks]
            rows.append(
                {
                    "table": "counts",
                    "transport": transport,
                    "K": k,
                    "C": size,
                    "wire_units": max(f["wire_units"] for f in found),
                    "paper_units": k * (2 * (size - 1) + 2 * size),
                    "automodel_units": k * (8 * size - 4) / 2 * HEADS / GROUPS,
                    "balance_max_over_mean": balance(size, 0),
                    "balance_window_half": balance(size, max(LENGTHS) // 2),
                    "saved_bytes_by_pass": max(f["saved"] for f in found),
                    "max_rel_err_fp32": worst_error(found, expected[k]),
                }
            )
    return rows


# ---- tables "kernel" and "prediction"
# ----------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rank_work(layout: PackedZigzag, transport: str, heads, device: str, dtype):
    """A function that computes one pass, forward and backward, of this layout's rank, and its pairs."""
    h, g, d = heads
    size, rank, rows = layout.cp_size, layout.cp_rank, layout.num_tokens
    make = lambda n, x: torch.randn(n, x, d, device=device, dtype=dtype)  # noqa: E731
    held = layout.num_tokens_global if transport == "gather" else rows
    q, do, k, v = make(rows, h), make(rows, h), make(held, g), make(held, g)
    tail = (layout.cu_seqlens, layout.max_seqlen, d**-0.5, 0)
    ops = torch.ops.torchspec

    def gather():
        out, lse = ops.branch_attention(q, k, v, [], [], [], *tail, size, rank, "")
        ops.branch_attention_backward(do, None, q, k, v, [], [], out, lse, True, *tail, size, rank, "")

    def ring():
        for step in range(size):
            piece = (*tail, size, rank, (rank - step) % size)
            out, lse = ops.trunk_piece(q, k, v, *piece)
            # the joint (out, lse) of a real ring differs in value only: every row must have seen a key
            lse = torch.where(lse == -torch.inf, 0.0, lse)
            ops.trunk_piece_backward(do, q, k, v, out, lse, *piece)

    view = TrunkView(layout.cu_seqlens.cpu(), layout.max_seqlen, 0, size, rank, FULL)
    return (gather if transport == "gather" else ring), visible_pairs(view, rows, layout.num_tokens_global)


def timed(function, device: str, repeats: int) -> float:
    """Median seconds."""
    function()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def documents(total: int) -> list[int]:
    """A ragged pack of ``total`` tokens: halves, the last two equal."""
    return [total // 2, total // 4, total // 8, total - total // 2 - total // 4 - total // 8]


def kernel_rows(args, tokens: list[int], heads: tuple[int, int, int]) -> list[dict]:
    """The table of times: the slowest of the first, middle and last rank, for C = 1, 2, 4, 8."""
    h, _, d = heads
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    rows = []
    for total in tokens:
        for transport in ("gather", "ring"):
            for size in (1, 2, 4, 8):
                seconds, flops = 0.0, 0
                for rank in sorted({0, size // 2, size - 1}):
                    layout = PackedZigzag(documents(total), cp_size=size, cp_rank=rank, device=args.device)
                    function, pairs = rank_work(layout, transport, heads, args.device, dtype)
                    seconds = max(seconds, timed(function, args.device, args.repeats))
                    flops = max(flops, 14 * h * d * pairs)
                rate = flops / seconds
                rows.append(
                    {
                        "table": "kernel",
                        "transport": transport,
                        "tokens": total,
                        "C": size,
                        "dtype": str(dtype)[6:],
                        "kernel_seconds": seconds,
                        "gflops_per_s": rate / 1e9,
                        "share_of_peak": rate / (args.peak_tflops * 1e12) if args.peak_tflops else None,
                    }
                )
    return rows


def prediction_rows(args, kernel: list[dict]) -> list[dict]:
    """Strong scaling 1 -> 8 of one draft layer: FLOPs over a rate plus bytes over the link, bf16 on the wire."""
    h, g, d = MODEL_HEADS
    most = max((row["tokens"] for row in kernel), default=0)
    measured = {(r["transport"], r["C"]): r["gflops_per_s"] * 1e9 for r in kernel if r["tokens"] == most}
    source = "given" if args.flops_per_s else f"{args.device}, {most} tokens, {kernel[0]['dtype']}"
    rows = []
    for transport in ("gather", "ring"):
        for passes in (1, 7):
            alone = None
            for size in (1, 2, 4, 8):
                layout = PackedZigzag(documents(MODEL_TOKENS), cp_size=size, cp_rank=size - 1)
                view = TrunkView(layout.cu_seqlens, layout.max_seqlen, 0, size, size - 1, FULL)
                pairs = visible_pairs(view, layout.num_tokens, layout.num_tokens_global)
                here = (transport, size) if most == MODEL_TOKENS else ("gather", 1)
                rate = args.flops_per_s or measured[here]
                units = passes * (2 * (size - 1) + 2 * size) if transport == "ring" else 3 * (size - 1)
                wire = (units if size > 1 else 0) * layout.num_tokens * 2 * g * d * torch.bfloat16.itemsize
                compute, travel = passes * 14 * h * d * pairs / rate, wire / (args.link_gb_per_s * 1e9)
                alone = alone or compute + travel
                rows.append(
                    {
                        "table": "prediction",
                        "transport": transport,
                        "K": passes,
                        "C": size,
                        "tokens": MODEL_TOKENS,
                        "rate_from": source,
                        "gflops_per_s": rate / 1e9,
                        "compute_seconds": compute,
                        "wire_gb": wire / 1e9,
                        "wire_seconds": travel,
                        "predicted_speedup": alone / (compute + travel),
                    }
                )
    return rows


# ---- printing
# --------------------------------------------------------------------------------------------------------


def text(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "/".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)


def show(title: str, rows: list[dict]) -> None:
    """Prints rows as a table of aligned columns."""
    cells = [list(rows[0]), *[[text(v) for v in row.values()] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="C up to 4 and small shapes: under a minute on 2 cores")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--link-gb-per-s", type=float, default=50.0, help="link of one rank, for the prediction")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="the card's matrix peak in the dtype used")
    parser.add_argument(
        "--flops-per-s", type=float, default=0.0, help="your card's, for the prediction, in place of the measured"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["counts", "scaling"], help="counts, or times and the prediction")
    args = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    if args.only != "scaling":
        rows += count_rows([2, 4] if args.quick else [2, 4, 8], [1, 3] if args.quick else [1, 3, 7])
        show("counts (bf16 bytes; fp32 errors)", rows)
    if args.only != "counts":
        if args.device == "cuda":
            tokens, heads = ([32768] if args.quick else [32768, 65536, 131072, 262144]), (32, 8, 128)
        else:
            tokens, heads = ([512] if args.quick else [2048, 4096]), (8, 2, 64)
        kernel = kernel_rows(args, tokens, heads)
        show(f"kernel (measured on {args.device}; one pass, forward and backward)", kernel)
        prediction = prediction_rows(args, kernel)
        show(
            f"prediction (computed, not measured: one draft layer, {MODEL_TOKENS} tokens; "
            f"link {args.link_gb_per_s:g} GB/s)",
            prediction,
        )
        rows += kernel + prediction
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
