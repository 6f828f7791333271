"""PP = 2 and PP = 4 equal one process, and the pipeline does the same with the draft on and off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_ranks import (
    LAYERS,
    ROWS,
    WIDTH,
    Draft,
    Part,
    cut,
    make_batch,
    make_weights,
    one_process,
    policy_loss,
    run_ranks,
    stage_of_taps,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from torchspec.pipeline.forward_only import forward_only_schedule
from torchspec.pipeline.schedule import COMPUTE_KINDS, SCHEDULES, rank_of_stages, schedule_table
from torchspec.pipeline.stage import CoTrainPipeline, entries
from torchspec.pipeline.tap_channel import open_channel
from torchspec.pipeline.tap_plan import make_tap_plan
from torchspec.ranks import own_group

pytestmark = pytest.mark.parity
SEED = int(torch.empty((), dtype=torch.int64).random_(2**31))
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def run_step(rank: int, group: Any, case: dict, seed: int) -> dict:
    """Two steps of one schedule (the second uses the slots again); what this rank found."""
    name, num_microbatches, mode = case["schedule"], case["microbatches"], case["mode"]
    num_ranks = dist.get_world_size()
    holders = rank_of_stages(name, num_ranks)
    layers, weights, log = cut(len(holders)), make_weights(seed), []
    parts = {
        s: Part(*layers[s], recompute=case.get("recompute", False)).load(weights)
        for s, holder in enumerate(holders)
        if holder == rank
    }
    static: dict[str, Any] = {}
    stages = []
    for s, part in parts.items():
        if case.get("static"):
            hidden = torch.empty(1, ROWS, WIDTH, requires_grad=True)
            static = dict(input_args=torch.empty(1, ROWS, dtype=torch.int64) if s == 0 else hidden, output_args=hidden)
        stages.append(PipelineStage(part, s, len(holders), torch.device("cpu"), group=group, **static))
    head = next((part.head for part in parts.values() if part.head is not None), None)
    loss_fn = lambda hidden, target: policy_loss(hidden, target, head)  # noqa: E731
    kind = get_schedule_class(name)
    schedule = kind(stages if len(holders) > num_ranks else stages[0], num_microbatches, loss_fn=loss_fn)

    channel = draft = None
    if mode != "off":
        plan = make_tap_plan(
            schedule_table(name, num_ranks, num_microbatches),
            stage_of_taps(layers),
            draft_schedule=mode,
            draft_stage=case.get("draft_stage", -1),
            slots=case.get("slots", 0),
        )
        channel = open_channel(plan, [range(num_ranks)], num_rows=ROWS, width=WIDTH, dtype=torch.float32, deadline_s=60)
        draft = Draft(weights) if channel.is_draft else None
    points = {tap: module for part in parts.values() for tap, module in part.tap_points().items()}
    pipeline = CoTrainPipeline(
        schedule,
        stages,
        channel,
        points if channel else {},
        draft_step=draft,
        log=log,
        on_microbatch=lambda s, m: setattr(parts[s], "microbatch", m),
    )
    found: dict[str, Any] = {}
    outputs: dict[int, torch.Tensor] = {}
    if mode == "inline" and not static:
        twins = [PipelineStage(part, s, len(holders), torch.device("cpu"), group=group) for s, part in parts.items()]
        forward = CoTrainPipeline(
            forward_only_schedule(name, twins, num_microbatches),
            twins,
            None,
            {},
            forward_only=True,
            on_microbatch=lambda s, m: setattr(parts[s], "microbatch", m),
            on_output=lambda m, output: outputs.__setitem__(m, output),
        )
    for step in range(2):
        del log[:]
        for module in (*parts.values(), *([draft] if draft else [])):
            module.zero_grad()
        tokens, targets = make_batch(seed + step, num_microbatches)
        losses: list[torch.Tensor] = []
        pipeline.step(*([tokens] if 0 in parts else []), target=targets if head is not None else None, losses=losses)
        assert not pipeline._captured  # neither the warm-up nor a recomputation left a tap behind
        grads = {n: p.grad.clone() for part in parts.values() for n, p in part.named_parameters()}
        grads |= {"losses": torch.stack(losses).detach()} if losses else {}
        if draft is not None:
            grads |= {f"draft.{n}": p.grad.clone() for n, p in draft.named_parameters()}
            grads["draft.losses"] = torch.stack(draft.losses[step * num_microbatches :])
        found[f"grads{step}"] = grads
        if mode == "inline" and not static:  # between two training steps, over the same modules
            forward.step(*([tokens] if 0 in parts else []))
            found["forward"] = dict(outputs)
    return found | {
        "entries": entries(log),
        "drafts": [e[2] for e in log if e[0] == "draft"],
        "log": [e[:3] for e in log],
    }


def worker(rank: int, cases: list[dict], seed: int) -> list[dict]:
    group = own_group([list(range(dist.get_world_size()))], 60)
    return [run_step(rank, group, case, seed) for case in cases]


def case(schedule: str, microbatches: int, mode: str, **more: Any) -> dict:
    return dict(schedule=schedule, microbatches=microbatches, mode=mode) | more


CASES_2 = [
    case(name, 5 if name in ("GPipe", "LoopedBFS", "1F1B") else 4, mode, recompute=name not in SPLIT_BACKWARD)
    for name in SCHEDULES
    for mode in ("inline", "deferred", "off")
]
CASES_2 += [
    case("GPipe", 6, "deferred", slots=1),
    case("GPipe", 6, "inline", slots=2),
    case("1F1B", 3, "inline", static=True),
    case("1F1B", 4, "deferred", draft_stage=0),
    case("ZBVZeroBubble", 4, "deferred", draft_stage=1),
]
CASES_4 = [
    case("1F1B", 5, "inline"),
    case("1F1B", 5, "deferred"),
    case("Interleaved1F1B", 4, "inline"),
    case("Interleaved1F1B", 4, "deferred"),
    case("ZBVZeroBubble", 7, "inline"),
    case("ZBVZeroBubble", 7, "deferred"),
]


def results(world_size: int, cases: list[dict]) -> list[list[dict]]:
    ranks = run_ranks(worker, world_size, cases, SEED, timeout_s=150)
    for rank, outcome in enumerate(ranks):
        assert outcome["exitcode"] == 0, f"rank {rank} (seed {SEED}): {outcome.get('trace', outcome)}"
    return [[outcome["result"][index] for outcome in ranks] for index in range(len(cases))]


@pytest.fixture(scope="module")
def two() -> list[list[dict]]:
    return results(2, CASES_2)


@pytest.fixture(scope="module")
def four() -> list[list[dict]]:
    return results(4, CASES_4)


def title(c: dict) -> str:
    return "-".join(
        str(value) if key in ("schedule", "microbatches", "mode") else f"{key}={value}" for key, value in c.items()
    )


def check_equal(ranks: list[dict], c: dict) -> None:
    for step in range(2):
        want = one_process(make_weights(SEED), SEED + step, c["microbatches"], draft_on=c["mode"] != "off")
        got = {name: value for rank in ranks for name, value in rank[f"grads{step}"].items()}
        assert got.keys() == want.keys()
        for name, right in want.items():
            error = (got[name] - right).norm() / right.norm()
            assert error < 2e-6, f"{name} of step {step} (seed {SEED}): relative error {error:.2e}"


@pytest.mark.parametrize("index", range(len(CASES_2)), ids=[title(c) for c in CASES_2])
def test_two_ranks_equal_one(two, index):
    """Losses, policy gradients and draft gradients of two steps, 2e-6 by norm."""
    check_equal(two[index], CASES_2[index])


@pytest.mark.parametrize("index", range(len(CASES_4)), ids=[title(c) for c in CASES_4])
def test_four_ranks_equal_one(four, index):
    check_equal(four[index], CASES_4[index])


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_only(two, name):
    """Forward-only passes between training steps, every schedule: the last stage's outputs, without
    gradients."""
    index = next(i for i, c in enumerate(CASES_2) if (c["schedule"], c["mode"]) == (name, "inline"))
    outputs = {m: output for rank in two[index] for m, output in rank["forward"].items()}
    tokens, _ = make_batch(SEED + 1, CASES_2[index]["microbatches"])
    policy = Part(0, LAYERS).load(make_weights(SEED))
    assert sorted(outputs) == list(range(len(tokens)))
    for m, output in outputs.items():
        policy.microbatch = m
        want = policy(tokens[m : m + 1])
        assert not output.requires_grad and (output - want).norm() < 2e-6 * want.norm()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_untouched(two, name):
    """Actions and messages, in order, recorded at the stages' own methods: the same with the draft inline,
    deferred, off."""
    mine = {
        c["mode"]: ranks
        for c, ranks in list(zip(CASES_2, two, strict=True))[: 3 * len(SCHEDULES)]
        if c["schedule"] == name
    }
    for rank in range(2):
        alone = mine["off"][rank]["entries"]
        assert sum(entry[0] == "F" for entry in alone) >= 4 and any(entry[0].startswith("SEND") for entry in alone)
        assert mine["inline"][rank]["entries"] == alone
        assert mine["deferred"][rank]["entries"] == alone
    # The table that plans the channel is what ran.
    table = schedule_table(name, 2, 5 if name in ("GPipe", "LoopedBFS", "1F1B") else 4)
    for rank in range(2):
        ran = [entry for entry in mine["off"][rank]["entries"] if entry[0] in "FBIW"]
        assert ran == [tuple(action) for action in table.actions(rank) if action.kind in "FBIW"]


def test_where_the_draft_runs(two):
    """Inline: once in each forward of the last stage. Deferred: in order, where the plan says, the rest at
    the end."""
    for c, ranks in zip(CASES_2, two, strict=True):
        drafts = [rank["drafts"] for rank in ranks if rank["drafts"]]
        assert drafts == ([] if c["mode"] == "off" else [list(range(c["microbatches"]))])
        for rank in ranks:
            if c["mode"] != "deferred" or not rank["drafts"]:
                continue
            counts, done = {}, 0
            for kind, _, m in rank["log"]:
                done += kind in COMPUTE_KINDS
                if kind == "draft":
                    counts[m] = done
            table = schedule_table(c["schedule"], 2, c["microbatches"])
            plan = make_tap_plan(
                table,
                stage_of_taps(cut(table.num_stages)),
                draft_schedule="deferred",
                draft_stage=c.get("draft_stage", -1),
            )
            early = {m: count for count, some in plan.draft_after.items() for m in some}
            assert counts == {m: early.get(m, done) for m in range(c["microbatches"])}
    assert early_drafts(), "no schedule here has drafts in its gaps; the check above is empty"


def early_drafts() -> list[str]:
    """Schedules whose deferred drafts do not all run at the end, of those above."""
    found = []
    for c in CASES_2:
        if c["mode"] == "deferred" and "draft_stage" not in c:
            table = schedule_table(c["schedule"], 2, c["microbatches"])
            if make_tap_plan(table, {0: 0}, draft_schedule="deferred").draft_after:
                found.append(c["schedule"])
    return found
