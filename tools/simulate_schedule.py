"""How much of the draft a pipeline's bubble hides: runs schedules with given costs, without processes.

    python tools/simulate_schedule.py               # all schedules, pp 2..16, 4..64 microbatches
    python tools/simulate_schedule.py --schedule 1F1B --pp 4 --microbatches 8 --draft 0.5 --timeline
    python tools/simulate_schedule.py --schedule DualPipeV --pp 4 --microbatches 8 --picture timeline.svg
    python tools/simulate_schedule.py --costs costs.json    # {"F": 1, "B": 2, "3F": 1.4, "draft": 0.5}

Costs are in any unit; without --costs a forward of a whole rank is 1 (a stage's share of it where a rank has
several stages), its backward 2. The draft costs --draft a microbatch, in units of such a forward. Policy
layers are not moved off the draft's stage here.

Columns: step (time of the step), step_ratio (over the step without a draft), hidden (share of the draft's
time that the step does not grow by), idle (idle time of the draft's rank after its own last action), bubble
(idle share of all ranks, without the draft), slots (tap messages held on the draft's rank, one tap a stage).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torchspec.errors import ConfigError
from torchspec.pipeline.schedule import SCHEDULES, ScheduleTable, schedule_table
from torchspec.pipeline.simulate import Costs, Result, Span, costs_from, simulate
from torchspec.pipeline.tap_plan import make_tap_plan

COLUMNS = (
    "schedule",
    "pp",
    "microbatches",
    "draft_schedule",
    "step",
    "step_ratio",
    "hidden",
    "idle",
    "bubble",
    "slots",
)


def rows_of(table: ScheduleTable, costs: Costs) -> tuple[list[dict], dict[str, Result]]:
    """One row for inline, one for deferred; and the runs (with "off" among them)."""
    taps = {stage: stage for stage in range(table.num_stages)}
    runs, rows = {"off": simulate(table, None, costs)}, []
    alone = runs["off"]
    busy = sum(span.end - span.start for span in alone.spans)
    for draft_schedule in ("inline", "deferred"):
        plan = make_tap_plan(table, taps, draft_schedule=draft_schedule, costs=costs)
        run = runs[draft_schedule] = simulate(table, plan.flow(), costs)
        draft = costs.draft * table.num_microbatches
        rows.append(
            {
                "schedule": table.name,
                "pp": table.num_ranks,
                "microbatches": table.num_microbatches,
                "draft_schedule": draft_schedule,
                "step": run.seconds,
                "step_ratio": run.seconds / alone.seconds,
                "hidden": 1 - (run.seconds - alone.seconds) / draft if draft else 1.0,
                "idle": alone.seconds - alone.last_action_end[plan.draft_rank],
                "bubble": 1 - busy / (alone.seconds * table.num_ranks),
                "slots": sum(plan.slots.values()),
            }
        )
    return rows, runs


def text_timeline(spans: list[Span], num_ranks: int, seconds: float, width: int = 100) -> str:
    """One line a rank: F B I W, D for the draft, a dot for idle."""
    lines = []
    for rank in range(num_ranks):
        line = ["."] * width
        for span in spans:
            if span.rank == rank and span.end > span.start:
                letter = "D" if span.label.startswith("draft") else span.label.strip("0123456789")
                first, last = int(span.start / seconds * width), int(span.end / seconds * width)
                line[first : max(last, first + 1)] = letter * (max(last, first + 1) - first)
        lines.append(f"rank {rank:2d} {''.join(line[:width])}")
    return "\n".join(lines)


def draw(file: Path, runs: dict[str, Result], table: ScheduleTable) -> None:
    """The timelines of the runs, one under the other, as a picture (SVG or PNG by the name)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = {"F": "#4c9be8", "B": "#7bbf6a", "I": "#a6d8a8", "W": "#d9c860", "D": "#d95f5f"}
    figure, axes = pyplot.subplots(
        len(runs), 1, sharex=True, figsize=(14, 1.0 + len(runs) * (0.6 + 0.32 * table.num_ranks))
    )
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        for span in run.spans:
            letter = "D" if span.label.startswith("draft") else span.label.strip("0123456789")
            axis.barh(
                span.rank,
                span.end - span.start,
                left=span.start,
                height=0.85,
                color=colours[letter],
                edgecolor="white",
                linewidth=0.4,
            )
            if table.num_microbatches * table.num_ranks <= 64:
                axis.text(
                    (span.start + span.end) / 2,
                    span.rank,
                    span.label.split()[-1],
                    ha="center",
                    va="center",
                    fontsize=5,
                )
        axis.set_yticks(range(table.num_ranks), [f"rank {rank}" for rank in range(table.num_ranks)])
        axis.invert_yaxis()
        axis.set_title(f"{table.name}, draft {name}: {run.seconds:.2f}", fontsize=9, loc="left")
    names = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights", "D": "draft"}
    figure.legend(
        handles=[Patch(color=colours[key], label=text) for key, text in names.items()],
        ncols=5,
        fontsize=8,
        loc="lower center",
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file)
    pyplot.close(figure)


def print_table(rows: list[dict], columns: tuple[str, ...]) -> None:
    """The rows under their column names."""
    cells = [[f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    for line in [list(columns), *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--pp", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--draft", type=float, default=0.5, help="draft's cost a microbatch, in forwards of a rank")
    parser.add_argument("--costs", type=Path, help="JSON file with costs by action")
    parser.add_argument("--timeline", action="store_true", help="print a timeline of every run")
    parser.add_argument("--picture", type=Path, help="draw the timelines of the last schedule run (SVG or PNG)")
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--quick", action="store_true", help="pp 2 and 4, 4 and 16 microbatches")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.pp, arguments.microbatches = [2, 4], [4, 16]
    rows, refused = [], []
    for name in arguments.schedule:
        for pp in arguments.pp:
            for microbatches in arguments.microbatches:
                try:
                    table = schedule_table(name, pp, microbatches)
                except ConfigError as error:
                    refused.append(str(error))
                    continue
                share = pp / table.num_stages
                given = (
                    json.loads(arguments.costs.read_text())
                    if arguments.costs
                    else {"F": share, "B": 2 * share, "I": share, "W": share, "draft": arguments.draft}
                )
                found, runs = rows_of(table, costs_from(given))
                rows += found
                if arguments.timeline:
                    for mode, run in runs.items():
                        print(f"{name}, pp {pp}, {microbatches} microbatches, draft {mode}: {run.seconds:.4g}")
                        print(text_timeline(run.spans, pp, max(r.seconds for r in runs.values())))
    if not rows:
        raise SystemExit("No schedule takes these numbers:\n" + "\n".join(sorted(set(refused))))
    print_table(rows, COLUMNS)
    if refused:
        print(f"{len(refused)} combinations are refused by their schedules, e.g.: {refused[0]}")
    if arguments.picture:
        draw(arguments.picture, runs, table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
