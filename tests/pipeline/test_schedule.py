"""The tables, against an independent reading of them, and the proof over every schedule, without
processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchspec.errors import ConfigError
from torchspec.pipeline.schedule import (
    SCHEDULES,
    Action,
    ScheduleTable,
    rank_of_stages,
    schedule_table,
    table_of,
)
from torchspec.pipeline.simulate import ScheduleError, costs_from, in_flight_maximum, simulate
from torchspec.pipeline.tap_plan import FINAL_HIDDEN, make_tap_plan

# Which microbatch counts of 1..16 a schedule takes with 4 ranks (two stages a rank where it has several).
ACCEPTED_4 = {
    "GPipe": range(1, 17),
    "LoopedBFS": range(1, 17),
    "ZBVZeroBubble": range(1, 17),
    "1F1B": range(4, 17),
    "DualPipeV": range(8, 17),
    "Interleaved1F1B": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16],
    "InterleavedZeroBubble": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16],
}


def accepted(name: str, num_ranks: int) -> list[ScheduleTable]:
    tables = []
    for m in range(1, 17):
        try:
            tables.append(schedule_table(name, num_ranks, m))
        except ConfigError:
            pass
    return tables


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_hold_every_action_once(name):
    """Per stage: M forwards in order 0..M-1, a full or a split backward of each after it, sends and receives
    in pairs."""
    tables = accepted(name, 4)
    assert [table.num_microbatches for table in tables] == list(ACCEPTED_4[name])
    for table in tables:
        for stage in range(table.num_stages):
            rank = table.stage_to_rank[stage]
            mine = [action for action in table.actions(rank) if action.stage == stage]
            every = list(range(table.num_microbatches))
            assert [action.microbatch for action in mine if action.kind == "F"] == every
            place = {action: index for index, action in enumerate(mine)}
            assert len(place) == len(mine), "an action twice"
            for m in every:
                forward, full = place[Action("F", stage, m)], place.get(Action("B", stage, m))
                if full is None:
                    assert forward < place[Action("I", stage, m)] < place[Action("W", stage, m)]
                else:
                    assert forward < full and Action("I", stage, m) not in place
            for kind, towards in (("SEND_F", 1), ("RECV_F", -1), ("SEND_B", -1), ("RECV_B", 1)):
                other = stage + towards
                crosses = 0 <= other < table.num_stages and table.stage_to_rank[other] != rank
                assert sorted(a.microbatch for a in mine if a.kind == kind) == (every if crosses else [])


def test_1f1b_last_rank():
    """torch's table has no 3F0 and a 3F4 that does not exist; what runs is F0 B0 F1 B1 ..."""
    names = [str(action) for action in schedule_table("1F1B", 4, 4).actions(3) if action.kind in "FB"]
    assert names == ["3F0", "3B0", "3F1", "3B1", "3F2", "3B2", "3F3", "3B3"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_taps_never_block_or_overflow(name, num_ranks):
    """Taps of every stage, draft inline and deferred, on the last stage and on stage 0: gets are matched,
    slots suffice."""
    for table in accepted(name, num_ranks):
        last = table.num_stages - 1
        for draft_stage, draft_schedule in ((last, "inline"), (last, "deferred"), (0, "deferred")):
            plan = make_tap_plan(
                table,
                {stage: stage for stage in range(table.num_stages)},
                draft_stage=draft_stage,
                draft_schedule=draft_schedule,
            )
            for buffered in (False, True):
                result = simulate(table, plan.flow(), buffered=buffered)
                for stage, slots in plan.slots.items():
                    assert result.peak_in_flight[stage] <= slots
            # The slots are no more than needed: some timing fills them.
            assert in_flight_maximum(table, plan.flow()).items() >= plan.slots.items()


def test_slots_are_the_schedules_own_maximum():
    """1F1B holds pp - s messages of stage s; GPipe all of them."""
    taps = {stage: stage for stage in range(4)}
    assert make_tap_plan(schedule_table("1F1B", 4, 16), taps).slots == {0: 4, 1: 3, 2: 2}
    assert make_tap_plan(schedule_table("GPipe", 4, 16), taps).slots == {0: 16, 1: 16, 2: 16}
    plan = make_tap_plan(schedule_table("ZBVZeroBubble", 2, 8), {0: 0, 2: 1, 3: 2})
    assert plan.draft_rank == 0 and plan.local_stages == (0,) and plan.links.keys() == {1}
    assert plan.slot_bytes(10, 8, 2) == 4 * 10 * 8 * 2


def test_fewer_slots_work_or_are_raised_to_the_least_that_does():
    table = schedule_table("GPipe", 4, 8)
    assert simulate(table, make_tap_plan(table, {0: 0, 2: 1}, slots=1).flow()).peak_in_flight[0] <= 2
    table = schedule_table("LoopedBFS", 2, 8)  # 8 forwards of stage 0 before one of stage 2: 4 in slots, 4 sends
    assert make_tap_plan(table, {0: 0}, slots=2).slots == {0: 4}
    assert make_tap_plan(table, {0: 0}, slots=5).slots == {0: 5}
    at_end = make_tap_plan(
        schedule_table("1F1B", 2, 6), {0: 0, 2: 1}, draft_stage=0, draft_schedule="deferred", slots=1
    )
    assert at_end.slots == {1: 3}  # all six wait for the rank's last action: three in slots, three sends


@pytest.mark.parametrize("name", SCHEDULES)
def test_deferred_is_never_slower_than_inline(name):
    """And where a rank idles after its last action, it is quicker by the smaller of the draft's time and that
    idle time."""
    for num_ranks in (2, 4):
        for table in accepted(name, num_ranks)[-4:]:
            share = num_ranks / table.num_stages
            for draft in (0.1, 0.5, 2.0):
                costs = costs_from({"F": share, "B": 2 * share, "I": share, "W": share, "draft": draft})
                runs = {
                    mode: simulate(table, make_tap_plan(table, {0: 0}, draft_schedule=mode, costs=costs).flow(), costs)
                    for mode in ("inline", "deferred")
                }
                saved = runs["inline"].seconds - runs["deferred"].seconds
                assert saved >= -1e-9
                if name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"):
                    alone = simulate(table, None, costs)
                    idle = alone.seconds - alone.last_action_end[table.stage_to_rank[-1]]
                    assert saved >= min(idle, draft * table.num_microbatches) - 1e-9


def test_messages_of_one_rank_are_merged_in_its_own_order():
    table = schedule_table("Interleaved1F1B", 2, 4)
    order = make_tap_plan(table, {0: 0, 5: 2}).links[0]
    assert order == tuple((a.stage, a.microbatch) for a in table.actions(0) if a.kind == "F")
    assert {stage for stage, _ in order} == {0, 2}


def swapped(table: ScheduleTable, rank: int, kind: str) -> ScheduleTable:
    """``table`` with the first two actions of ``kind`` on ``rank`` exchanged."""
    steps = list(table.steps[rank])
    first, second = [index for index, step in enumerate(steps) if step[0].kind == kind][:2]
    steps[first], steps[second] = steps[second], steps[first]
    return replace(table, steps=table.steps[:rank] + (tuple(steps),) + table.steps[rank + 1 :])


def test_the_simulation_sees_what_is_wrong():
    """A table whose receives are exchanged, a link in the wrong order, a get that no put answers: each is
    refused."""
    table = schedule_table("Interleaved1F1B", 2, 4)
    with pytest.raises(ScheduleError, match="wait"):
        simulate(swapped(table, 1, "RECV_F"))
    with pytest.raises(ScheduleError, match="wait|input"):
        simulate(swapped(schedule_table("GPipe", 2, 4), 1, "F"))
    plan = make_tap_plan(table, {0: 0, 2: 2})
    order = plan.links[0]
    wrong = replace(plan.flow(), links={0: (order[-1],) + order[1:-1] + (order[0],)})
    with pytest.raises(ScheduleError, match="waits for ever: .*get 0"):
        simulate(table, wrong)
    missing = replace(plan.flow(), links={0: tuple(message for message in order if message != (2, 3))})
    with pytest.raises(ScheduleError, match="get 3"):
        simulate(table, missing)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(draft_stage=9), "stages 0 to 3"),
        (dict(draft_stage=0), "cannot run inline"),
        (dict(draft_schedule="later"), "inline"),
        (dict(stage_of_tap={}), "no taps"),
        (dict(stage_of_tap={2: 7}), "Tap 2"),
        (dict(slots=-1), "slots = -1"),
    ],
)
def test_plans_that_cannot_work(change, sentence):
    arguments = dict(stage_of_tap={0: 0}) | change
    with pytest.raises(ConfigError, match=sentence):
        make_tap_plan(schedule_table("Interleaved1F1B", 2, 4), **arguments)


def test_final_hidden_travels_when_the_draft_is_not_last():
    plan = make_tap_plan(schedule_table("1F1B", 4, 4), {0: 0, 2: 1}, draft_stage=1, draft_schedule="deferred")
    assert plan.gets_at_end and plan.taps_of[3] == (FINAL_HIDDEN,) and plan.slots[3] == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("FooPipe", 2, 4), "torch ships"),
        (("1F1B", 4, 3), "GPipe takes any"),
        (("Interleaved1F1B", 2, 5), "does not take 5"),
        (("DualPipeV", 2, 3), "does not take 3"),
        (("GPipe", 2, 4, 2), "one stage"),
        (("ZBVZeroBubble", 2, 4, 3), "two stages"),
        (("GPipe", 2, 0), "at least one"),
    ],
)
def test_schedules_that_are_refused(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        schedule_table(*arguments)


def test_unknown_schedule_objects_are_refused():
    with pytest.raises(ConfigError, match="object is no pipeline schedule"):
        table_of(object())
    assert rank_of_stages("DualPipeV", 3) == (0, 1, 2, 2, 1, 0)
