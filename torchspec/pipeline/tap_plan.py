"""What the tap channel of one schedule has to carry: who sends which taps, in which order, into how many
slots.

Legend: T rows of a microbatch, E hidden size, M microbatches. A source is a stage that captures taps; it is
remote when it lives on another rank than the draft, and only remote sources use the channel.

Memory of the slots, on the draft's rank: sum over remote sources of slots x taps of the source x T x E x
bytes of an element. The number of slots is the most messages of that source that the schedule can have under
way, over all timings (measured by running the schedule's table with the draft held back), so a put never
waits. At M = 16 and 4 ranks that is 4, 3, 2 for 1F1B, but 16 for GPipe and LoopedBFS, whose first stage runs
all its forwards before the last stage must run any: give ``slots`` to bound it, and the sources wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchspec.errors import ConfigError
from torchspec.pipeline.schedule import COMPUTE_KINDS, SEND_KINDS, ScheduleTable
from torchspec.pipeline.simulate import Costs, ScheduleError, TapFlow, costs_from, in_flight_maximum, simulate

FINAL_HIDDEN = -1
"""Tap id of the last stage's output (the input of the head). It travels only when the draft is on another
stage."""


@dataclass(frozen=True)
class TapPlan:
    """Made by ``make_tap_plan``. ``taps_of[stage]``: the tap ids that the stage captures, ascending."""

    table: ScheduleTable
    draft_stage: int
    draft_schedule: str
    taps_of: Mapping[int, tuple[int, ...]]
    links: Mapping[int, tuple[tuple[int, int], ...]]
    slots: Mapping[int, int]
    draft_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Deferred: number of compute actions done on the draft's rank -> microbatches whose draft runs then. The
    others run after the rank's last action."""

    @property
    def draft_rank(self) -> int:
        """The pipeline rank that holds the draft."""
        return self.table.stage_to_rank[self.draft_stage]

    @property
    def local_stages(self) -> tuple[int, ...]:
        """Sources on the draft's own rank: their taps are handed over, not sent."""
        return tuple(stage for stage in self.taps_of if self.table.stage_to_rank[stage] == self.draft_rank)

    @property
    def gets_at_end(self) -> bool:
        """Whether a source comes after the draft's stage, so that the draft can only get after its rank's
        last action."""
        return max(self.taps_of) > self.draft_stage

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Every tap that the draft gets, ascending."""
        return tuple(sorted(tap for taps in self.taps_of.values() for tap in taps))

    def flow(self) -> TapFlow:
        """The plan as the simulation takes it."""
        return TapFlow(
            self.draft_stage,
            self.links,
            dict(self.slots),
            self.local_stages,
            self.gets_at_end,
            self.draft_schedule == "deferred",
            self.draft_after,
        )

    def slot_bytes(self, num_rows: int, width: int, itemsize: int) -> int:
        """Memory of all slots on the draft's rank, by the formula on top of this file."""
        return (
            sum(count * len(self.taps_of[stage]) for stage, count in self.slots.items()) * num_rows * width * itemsize
        )


def make_tap_plan(
    table: ScheduleTable,
    stage_of_tap: Mapping[int, int],
    *,
    draft_stage: int = -1,
    draft_schedule: str = "inline",
    slots: int = 0,
    costs: Costs | None = None,
) -> TapPlan:
    """Plan the channel beside ``table``.

    ``stage_of_tap``: tap id -> the stage that captures it. ``draft_stage`` -1 is the last. ``slots`` 0 takes
    the schedule's own in-flight maximum for every source; another number is an upper bound, raised where the
    schedule would wait for ever with so few. ``costs`` (any
    unit) decide where deferred drafts go; None takes a backward twice as long as a forward, and a draft of
    half a forward of the rank.

    Raises ConfigError for a stage that is not there, and for a draft that would have to run before its taps
    exist.
    """
    last = table.num_stages - 1
    draft_stage = last if draft_stage == -1 else draft_stage
    if not 0 <= draft_stage <= last:
        raise ConfigError(f"draft.stage = {draft_stage}: the pipeline has the stages 0 to {last}; -1 is the last.")
    if draft_schedule not in ("inline", "deferred"):
        raise ConfigError(f"draft.schedule = '{draft_schedule}' is not known; write 'inline' or 'deferred'.")
    if not stage_of_tap:
        raise ConfigError("The draft asks for no taps; it needs at least the token embeddings, tap 0.")
    for tap, stage in stage_of_tap.items():
        if not 0 <= stage <= last:
            raise ConfigError(f"Tap {tap} is said to come from stage {stage}; the pipeline has the stages 0 to {last}.")
    owner = dict(stage_of_tap)
    if draft_stage != last:
        owner[FINAL_HIDDEN] = last
    taps_of = {
        stage: tuple(sorted(tap for tap, place in owner.items() if place == stage))
        for stage in sorted(set(owner.values()))
    }
    if max(taps_of) > draft_stage and draft_schedule == "inline":
        raise ConfigError(
            f"draft.stage = {draft_stage}: the final hidden states come from stage {last}, after that "
            "stage's forward, so the draft cannot run inline there; use draft.schedule = 'deferred' or the "
            "last stage."
        )
    draft_rank = table.stage_to_rank[draft_stage]
    remote = [stage for stage in taps_of if table.stage_to_rank[stage] != draft_rank]
    links = {
        rank: tuple(table.forward_order(rank, [stage for stage in remote if table.stage_to_rank[stage] == rank]))
        for rank in sorted({table.stage_to_rank[stage] for stage in remote})
    }
    plan = TapPlan(
        table,
        draft_stage,
        draft_schedule,
        taps_of,
        links,
        {stage: table.num_microbatches for stage in remote},
    )
    most = in_flight_maximum(table, plan.flow())
    plan = _with_slots(plan, {stage: most[stage] for stage in remote}, slots)
    if draft_schedule == "deferred" and not plan.gets_at_end:
        plan = _place_drafts(plan, costs or _usual_costs(table))
    return plan


def _with_slots(plan: TapPlan, most: Mapping[int, int], bound: int) -> TapPlan:
    def bounded(limit: int) -> TapPlan:
        return replace(plan, slots={stage: min(limit, count) if limit else count for stage, count in most.items()})

    if bound < 0:
        raise ConfigError(
            f"slots = {bound}: write the most messages to hold of each source, or 0 for what the schedule "
            "can have under way."
        )
    # With too few a source waits for ever: it runs further ahead than that before the draft's stage can start.
    limits = range(bound, max(most.values(), default=0) + 1) if bound else (0,)
    return next(tried for limit in limits if _runs(tried := bounded(limit)))


def _runs(plan: TapPlan) -> bool:
    try:
        simulate(plan.table, plan.flow())
    except ScheduleError:
        return False
    return True


def _usual_costs(table: ScheduleTable) -> Costs:
    share = table.num_ranks / table.num_stages
    return costs_from({"F": share, "B": 2 * share, "I": share, "W": share, "draft": 0.5})


def _place_drafts(plan: TapPlan, costs: Costs) -> TapPlan:
    """Where the deferred drafts of ``plan`` run: the placement with the shortest simulated step.

    Tried are: all after the rank's last action; each in its own forward; and in the rank's idle gaps, as soon
    as a gap is a given share of a draft long. V schedules have such gaps in their middle and no idle time at
    the end. A draft never goes between an action and its send, which would hold up the other ranks.
    """
    table, rank = plan.table, plan.draft_rank
    actions = [action for action in table.actions(rank) if action.kind in COMPUTE_KINDS]
    forward_of = {
        action.microbatch: count
        for count, action in enumerate(actions, 1)
        if action.kind == "F" and action.stage == plan.draft_stage
    }
    at_end = simulate(table, plan.flow(), costs)
    spans = [span for span in at_end.spans if span.rank == rank and not span.label.startswith("draft")]
    gaps = {
        count: after.start - before.end for count, (before, after) in enumerate(zip(spans, spans[1:], strict=False), 1)
    }
    placements = [{count: (m,) for m, count in forward_of.items()}]
    placements += [
        _fill(gaps, forward_of, _sends_pending(table, rank), costs.draft, share) for share in (1.0, 0.75, 0.5, 0.25)
    ]
    best, best_seconds = plan, at_end.seconds
    for draft_after in placements:
        tried = replace(plan, draft_after=draft_after)
        seconds = simulate(table, tried.flow(), costs).seconds
        if seconds < best_seconds * (1 - 1e-9):
            best, best_seconds = tried, seconds
    return best


def _fill(
    gaps: Mapping[int, float], forward_of: Mapping[int, int], pending: set[int], draft: float, share: float
) -> dict[int, tuple[int, ...]]:
    """Drafts, in order, into gaps of at least ``share`` of a draft."""
    placed: dict[int, tuple[int, ...]] = {}
    m = 0
    for count, gap in gaps.items():
        while m < len(forward_of) and forward_of[m] <= count and count not in pending and 0 < share * draft <= gap:
            placed[count] = (*placed.get(count, ()), m)
            gap -= draft
            m += 1
    return placed


def _sends_pending(table: ScheduleTable, rank: int) -> set[int]:
    """Counts of done compute actions after which the rank still has to send something that it has."""
    computed: dict[tuple[str, int, int], int] = {}
    pending: set[int] = set()
    count = 0
    for action in table.actions(rank):
        if action.kind in COMPUTE_KINDS:
            count += 1
            if action.kind != "W":
                computed["F" if action.kind == "F" else "B", action.stage, action.microbatch] = count
        elif action.kind in SEND_KINDS:
            pending.update(range(computed[action.kind[-1], action.stage, action.microbatch], count + 1))
    return pending
