"""What the draft costs beside a pipeline: taps alone, draft inline, draft deferred; measured and predicted.

    python tools/bench_pipeline.py              # all schedules, pp 2, some minutes
    python tools/bench_pipeline.py --quick      # 1F1B, Interleaved1F1B and ZBVZeroBubble, under a minute
    python tools/bench_pipeline.py --schedule GPipe --microbatches 8 --rounds 15 --json rows.json

Real gloo ranks, one thread each (on 2 cores more than 2 ranks share cores and the times mean little). In
every round each schedule runs five steps after one another: without taps, the same again, with taps sent and
the draft's compute off, with the draft inline, and deferred. Ratios are medians over rounds of times within
one round.

Columns: step_ratio (step over the step without taps), taps_only_ratio (the same with taps sent and no draft;
limit 1.02), noise_ratio (a step without taps over another one: what a ratio means on this machine),
predicted_ratio (the simulator's step_ratio, from the measured times of the actions without a draft, of the
draft, and of one message), saved (inline minus deferred, seconds), saved_expected (GPipe, 1F1B,
Interleaved1F1B, LoopedBFS: the smaller of the draft's time and the idle time of its rank after its own last
action; 0 for the others), draft (its seconds a step).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from torchspec.pipeline.schedule import SCHEDULES, rank_of_stages, schedule_table
from torchspec.pipeline.simulate import costs_from, simulate
from torchspec.pipeline.stage import CoTrainPipeline
from torchspec.pipeline.tap_channel import open_channel
from torchspec.pipeline.tap_plan import make_tap_plan
from torchspec.ranks import own_group

COLUMNS = (
    "schedule",
    "pp",
    "microbatches",
    "draft_schedule",
    "step_ratio",
    "taps_only_ratio",
    "noise_ratio",
    "predicted_ratio",
    "step",
    "draft",
    "saved",
    "saved_expected",
)
MODES = ("off", "again", "taps", "inline", "deferred")
DRAIN = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
DEADLINE = 60.0


class Layers(nn.Module):
    """``num`` feed-forward layers with a residual; their inputs are the taps."""

    def __init__(self, num: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num)
        )

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h


class DraftStep:
    """A small draft: reads all taps, ``num`` layers, imitates the final hidden state."""

    def __init__(self, num_taps: int, width: int, num: int):
        self.fc, self.body = nn.Linear(num_taps * width, width), Layers(num, width)

    def __call__(self, microbatch: int, taps: dict[int, Tensor], final_hidden: Tensor) -> None:
        F.mse_loss(self.body(self.fc(torch.cat(list(taps.values()), -1))), final_hidden).backward()


def build(
    rank: int,
    name: str,
    mode: str,
    parts: Mapping[int, Layers],
    group: Any,
    options: argparse.Namespace,
    costs: dict[str, float] | None,
) -> tuple[CoTrainPipeline, list[tuple]]:
    """The pipeline of one mode, over the modules that all modes share."""
    holders = rank_of_stages(name, options.pp)
    hidden = torch.empty(1, options.rows, options.width, requires_grad=True)
    stages = [
        PipelineStage(part, s, len(holders), torch.device("cpu"), group=group, input_args=hidden, output_args=hidden)
        for s, part in parts.items()
    ]
    log: list[tuple] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        start = time.perf_counter()
        loss = F.mse_loss(output, target)
        log.append(("loss", 0, 0, start, time.perf_counter()))
        return loss

    kind = get_schedule_class(name)
    schedule = kind(stages if len(stages) > 1 else stages[0], options.microbatches, loss_fn=loss_fn)
    channel, points, draft = None, {}, None
    if mode not in ("off", "again"):
        # Two taps in the first half of the stages, one in the second: what an EAGLE-3 draft reads.
        stage_of_tap = {0: 0, 1: len(holders) // 2 - 1, 2: len(holders) - 1}
        plan = make_tap_plan(
            schedule_table(name, options.pp, options.microbatches),
            stage_of_tap,
            draft_schedule="deferred" if mode == "deferred" else "inline",
            costs=costs_from(costs) if costs else None,
        )
        channel = open_channel(
            plan,
            [range(options.pp)],
            num_rows=options.rows,
            width=options.width,
            dtype=torch.float32,
            deadline_s=DEADLINE,
        )
        points = {
            tap: parts[stage].layers[min(tap, 1) if len(parts[stage].layers) > 1 else 0]
            for tap, stage in stage_of_tap.items()
            if stage in parts
        }
        if channel.is_draft and mode != "taps":
            draft = DraftStep(len(stage_of_tap), options.width, options.draft_layers)
    return CoTrainPipeline(schedule, stages, channel, points, draft_step=draft, log=log), log


def one_step(pipeline: CoTrainPipeline, parts: Mapping[int, Layers], last: int, options: argparse.Namespace) -> float:
    """Seconds of a step: from the first rank's start to the last rank's end (one clock for all ranks of a
    machine)."""
    batch = torch.ones(options.microbatches, options.rows, options.width)
    for part in parts.values():
        part.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    pipeline.step(*([batch] if 0 in parts else []), target=batch if last in parts else None)
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, (start, time.perf_counter()))
    return max(end for _, end in times) - min(start for start, _ in times)


def action_costs(logs: list[tuple], last: int) -> dict[str, float]:
    """Median seconds of every action of this rank ("3F"), of the draft, and of the loss in the last stage's
    forward."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in logs:
        if entry[0] in ("F", "B", "I", "W", "draft", "loss"):
            name = entry[0] if entry[0] in ("draft", "loss") else f"{entry[1]}{entry[0]}"
            found[name].append(entry[4] - entry[3])
    costs = {name: statistics.median(seconds) for name, seconds in found.items()}
    if f"{last}F" in costs:
        costs[f"{last}F"] += costs.get("loss", 0.0)
    return costs


def message_seconds(rank: int, group: Any, options: argparse.Namespace) -> float:
    """Seconds of one activation between two ranks, median."""
    rows, found = torch.zeros(options.rows, options.width), []
    for _ in range(12):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(rows, group=group, group_dst=1)
            dist.recv(rows, group=group, group_src=1)
        elif rank == 1:
            dist.recv(rows, group=group, group_src=0)
            dist.send(rows, group=group, group_dst=0)
        found.append((time.perf_counter() - start) / 2)
    return statistics.median(found[2:])


def merged_costs(mine: dict[str, float], message: float) -> dict[str, float]:
    """Every rank's costs in one table."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: cost for costs in every for name, cost in costs.items()} | {"p2p": message, "tap": message}


def measure(rank: int, name: str, group: Any, message: float, options: argparse.Namespace) -> list[dict]:
    """The rows of one schedule (on every rank; rank 0's are used)."""
    holders = rank_of_stages(name, options.pp)
    last = len(holders) - 1
    per_stage = options.layers // (len(holders) // options.pp)
    parts = {s: Layers(per_stage, options.width) for s, holder in enumerate(holders) if holder == rank}
    pipelines = {mode: build(rank, name, mode, parts, group, options, None) for mode in ("off", "inline")}
    for pipeline, _ in pipelines.values():  # warm up, and measure the actions that place the deferred drafts
        for _ in range(2):
            one_step(pipeline, parts, last, options)
    first = action_costs(pipelines["off"][1], last)
    first |= {key: cost for key, cost in action_costs(pipelines["inline"][1], last).items() if key == "draft"}
    costs = merged_costs(first, message)
    pipelines |= {mode: build(rank, name, mode, parts, group, options, costs) for mode in ("again", "taps", "deferred")}
    for mode in ("again", "taps", "deferred"):
        one_step(pipelines[mode][0], parts, last, options)
    for _, log in pipelines.values():
        log.clear()
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for mode in MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]:
            seconds[mode].append(one_step(pipelines[mode][0], parts, last, options))
    final = action_costs(pipelines["off"][1], last)
    drafts = pipelines["inline"][1] + pipelines["deferred"][1]
    final |= {key: cost for key, cost in action_costs(drafts, last).items() if key == "draft"}
    return make_rows(name, seconds, costs_from(merged_costs(final, message)), pipelines["deferred"][0], options)


def make_rows(
    name: str,
    seconds: Mapping[str, list[float]],
    costs: Any,
    deferred: CoTrainPipeline,
    options: argparse.Namespace,
) -> list[dict]:
    def ratio(mode: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[mode], seconds["off"], strict=True))

    table = schedule_table(name, options.pp, options.microbatches)
    alone = simulate(table, None, costs)
    assert deferred.channel is not None
    plan = deferred.channel.plan
    draft = costs.draft * options.microbatches
    idle = alone.seconds - alone.last_action_end[plan.draft_rank]
    saved = statistics.median(a - b for a, b in zip(seconds["inline"], seconds["deferred"], strict=True))
    rows = []
    for mode in ("inline", "deferred"):
        flow = (
            plan.flow()
            if mode == "deferred"
            else make_tap_plan(table, {tap: stage for stage, taps in plan.taps_of.items() for tap in taps}).flow()
        )
        predicted = simulate(table, flow, costs).seconds
        rows.append(
            {
                "schedule": name,
                "pp": options.pp,
                "microbatches": options.microbatches,
                "draft_schedule": mode,
                "step_ratio": ratio(mode),
                "taps_only_ratio": ratio("taps"),
                "noise_ratio": ratio("again"),
                "predicted_ratio": predicted / alone.seconds,
                "step": statistics.median(seconds[mode]),
                "draft": draft,
                "saved": saved,
                "saved_expected": min(draft, idle) if name in DRAIN else 0.0,
                "predicted_step": predicted,
                "step_without_taps": statistics.median(seconds["off"]),
                "predicted_step_without_taps": alone.seconds,
            }
        )
    return rows


def rank_main(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", options.pp),
        rank=rank,
        world_size=options.pp,
        timeout=timedelta(seconds=DEADLINE),
    )
    group = own_group([list(range(options.pp))], DEADLINE)
    message = message_seconds(rank, group, options)
    rows = [row for name in options.schedule for row in measure(rank, name, group, message, options)]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULES)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="tokens of a microbatch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4, help="policy layers of a rank")
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.schedule = options.schedule or ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
        options.microbatches, options.rounds, options.rows, options.width = 4, 3, 128, 256
    options.schedule = options.schedule or list(SCHEDULES)
    limit = 120.0 if options.quick else 1200.0
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, options), daemon=True) for rank in range(options.pp)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        try:
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
        finally:  # also on Ctrl-C: no rank outlives this process
            for process in ranks:
                process.kill()
                process.join()
        file = Path(folder, "rows.json")
        if not file.exists():
            raise SystemExit(f"The ranks ended with {[process.exitcode for process in ranks]} and left no result.")
        rows = json.loads(file.read_text())
    cells = [[f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in COLUMNS] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(COLUMNS)]
    for line in [list(COLUMNS), *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
