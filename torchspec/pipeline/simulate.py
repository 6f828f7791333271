"""Runs a schedule's table without processes: who waits for whom, when, and whether anything waits for ever.

Used for the proof over all schedules (tests), for sizing the slots (tap_plan.py) and for the timeline picture
(tools/simulate_schedule.py).

Model. A rank does its operations one after the other. Sends and receives of the pipeline are posted; a
compute action waits for its own receive. Two ranks that exchange anything share one queue, and what either
posts there is done in the order of posting: a send is done only when it meets its receive at the head of both
queues (a batch meets its counterparts in any order). This is the strictest behaviour of any backend (NCCL,
one communicator a pair, nothing buffered): what runs here runs on gloo too. Every wait of the model is for an
event whose cause does not depend on time, so one run without a deadlock proves that no timing has one.

Taps travel beside it: "put" after a forward of a source stage, "get" in a forward of the draft's stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torchspec.pipeline.schedule import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS, Action, ScheduleTable, Step


@dataclass(frozen=True)
class TapFlow:
    """What the channel adds to a schedule, as the simulation sees it.

    ``links[rank]``: (stage, microbatch) of the messages of a source rank, in the order in which they are
    sent. ``slots[stage]``: messages that the draft's rank can hold of that source stage; None for no bound.
    ``local_stages``: source stages that live on the draft's own rank. ``at_end``: get (and draft) after the
    rank's last action, not in its forward. ``deferred``: the draft runs later than in the forward: after as
    many compute actions of its rank as ``draft_after`` says (count -> microbatches), the rest after the
    rank's last action.
    """

    draft_stage: int
    links: Mapping[int, tuple[tuple[int, int], ...]]
    slots: Mapping[int, int | None]
    local_stages: tuple[int, ...] = ()
    at_end: bool = False
    deferred: bool = False
    draft_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """Seconds. ``compute(action)`` for F, B, I, W; the others for one message or one microbatch."""

    compute: Callable[[Action], float] = lambda action: 0.0
    p2p: float = 0.0
    tap: float = 0.0
    draft: float = 0.0


def costs_from(table: Mapping[str, float]) -> Costs:
    """Costs from numbers: "F", "B", "I", "W" (of any stage), "3F" (of stage 3, goes before "F"), "p2p",
    "tap", "draft".

    A missing B is I + W, a missing I or W is half of B. Raises KeyError for an action without a cost.
    """

    def compute(action: Action) -> float:
        def cost(kind: str) -> float | None:
            return table.get(f"{action.stage}{kind}", table.get(kind))

        found = cost(action.kind)
        if found is None and action.kind == "B" and cost("I") is not None and cost("W") is not None:
            found = cost("I") + cost("W")
        if found is None and action.kind in "IW" and cost("B") is not None:
            found = cost("B") / 2
        if found is None:
            raise KeyError(f"no cost is given for {action}: write '{action.kind}' or '{action.stage}{action.kind}'")
        return found

    return Costs(compute, table.get("p2p", 0.0), table.get("tap", 0.0), table.get("draft", 0.0))


@dataclass(frozen=True)
class Span:
    """One bar of the timeline: ``label`` is an action ("3F0") or "draft 0"."""

    rank: int
    label: str
    start: float
    end: float


@dataclass
class Result:
    """A run that reached the end. ``peak_in_flight[stage]``: most messages put and not yet freed."""

    seconds: float
    spans: list[Span]
    last_action_end: dict[int, float]
    peak_in_flight: dict[int, int]


class ScheduleError(AssertionError):
    """The table cannot run: a wait that never ends, or a message that meets the wrong receive."""


Operation = tuple
"""("post", step) | ("sends",) | ("compute", action) | ("put", s, m) | ("get", m) | ("free", m) | ("draft", m)
| ("end",)"""


def programs(table: ScheduleTable, taps: TapFlow | None) -> list[list[Operation]]:
    """The operations of every rank, in order."""
    all_programs = []
    for rank in range(table.num_ranks):
        drafts = taps is not None and rank == table.stage_to_rank[taps.draft_stage]
        program: list[Operation] = []
        num_computed = 0
        for step in table.steps[rank]:
            program += _operations(step, table, taps, rank)
            num_computed += step[0].kind in COMPUTE_KINDS
            if drafts and step[0].kind in COMPUTE_KINDS:
                program += [("draft", m) for m in taps.draft_after.get(num_computed, ())]
        program.append(("end",))
        if drafts and (taps.at_end or taps.deferred):
            early = {m for some in taps.draft_after.values() for m in some}
            for m in range(table.num_microbatches):
                program += [("get", m), ("free", m)] if taps.at_end else []
                program += [("draft", m)] if m not in early else []
        all_programs.append(program)
    return all_programs


def _operations(step: Step, table: ScheduleTable, taps: TapFlow | None, rank: int) -> list[Operation]:
    first = step[0]
    if first.kind == "WAIT_SENDS":
        return [("sends",)]
    if first.kind not in COMPUTE_KINDS:
        return [("post", step)]
    operations: list[Operation] = [("compute", first)]
    if taps is None or first.kind != "F":
        return operations
    if first.stage in taps.slots or first.stage in taps.local_stages:
        operations.append(("put", first.stage, first.microbatch))
    if first.stage == taps.draft_stage and not taps.at_end:
        operations.append(("get", first.microbatch))
        if not taps.deferred:
            operations.append(("draft", first.microbatch))
        operations.append(("free", first.microbatch))
    return operations


class Machine:
    """All ranks of one run. ``run`` advances every rank as far as it can go."""

    def __init__(
        self,
        table: ScheduleTable,
        taps: TapFlow | None = None,
        costs: Costs = Costs(),
        *,
        buffered: bool = False,
    ):
        self.table, self.taps, self.costs, self.buffered = table, taps, costs, buffered
        self.programs = programs(table, taps)
        self.position = [0] * table.num_ranks
        self.clock = [0.0] * table.num_ranks
        self.spans: list[Span] = []
        self.last_action_end: dict[int, float] = {}
        self.queues: dict[tuple[int, int], list[_Batch]] = defaultdict(list)  # (rank, peer) -> what rank posted
        self.head: dict[tuple[int, int], int] = defaultdict(int)
        self.posted_at: dict[Action, float] = {}  # buffered only
        self.done: dict[Action, float] = {}  # sends and receives that are complete -> when
        self.unfinished_sends: list[list[Action]] = [[] for _ in range(table.num_ranks)]
        self.computed: dict[Action, float] = {}
        self.put_time: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[int, int], float] = {}
        self.freed: dict[int, list[float]] = defaultdict(list)  # source stage -> when its messages were freed
        self.num_put: dict[int, int] = defaultdict(int)
        self.peak: dict[int, int] = defaultdict(int)
        self.hold_get = table.num_microbatches  # gets from this microbatch on never run (slot sizing)

    # -- the loop

    def run(self) -> None:
        """Advance every rank until none can go on."""
        progress = True
        while progress:
            progress = False
            for rank in range(self.table.num_ranks):
                program = self.programs[rank]
                while self.position[rank] < len(program) and self._try(rank, program[self.position[rank]]):
                    self.position[rank] += 1
                    progress = True

    def finished(self) -> bool:
        return all(self.position[rank] == len(self.programs[rank]) for rank in range(self.table.num_ranks))

    def stuck(self) -> str:
        """What every unfinished rank waits for."""
        waits = []
        for rank, program in enumerate(self.programs):
            if self.position[rank] < len(program):
                name, *rest = program[self.position[rank]]
                waits.append(f"rank {rank} at {name} {' '.join(str(part) for part in rest)}")
        return "; ".join(waits)

    def _try(self, rank: int, operation: Operation) -> bool:
        return getattr(self, "_do_" + operation[0])(rank, *operation[1:])

    # -- the pipeline's own work

    def _do_compute(self, rank: int, action: Action) -> bool:
        start = self._inputs_ready(rank, action)
        if start is None:
            return False
        self._spend(rank, str(action), start, self.costs.compute(action))
        self.computed[action] = self.clock[rank]
        return True

    def _inputs_ready(self, rank: int, action: Action) -> float | None:
        """When ``action`` has its input; None while it has not."""
        if action.kind == "W" or (action.kind == "F" and action.stage == 0):
            return self.clock[rank]
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        if before == self.table.num_stages:
            return self.clock[rank]
        if self.table.stage_to_rank[before] == rank:  # handed over by a function call: program order must provide it
            kinds = ("F",) if action.kind == "F" else ("B", "I")
            times = [
                self.computed[key]
                for kind in kinds
                if (key := Action(kind, before, action.microbatch)) in self.computed
            ]
            if not times:
                raise ScheduleError(f"rank {rank} runs {action} before its own stage {before} gave the input")
            return self.clock[rank]
        arrival = self.done.get(Action("RECV_F" if action.kind == "F" else "RECV_B", action.stage, action.microbatch))
        return None if arrival is None else max(self.clock[rank], arrival)

    def _do_post(self, rank: int, step: Step) -> bool:
        if self.buffered:
            return self._post_buffered(rank, step)
        peers = {self._peer(action) for action in step}
        for peer in peers:
            batch = _Batch([action for action in step if self._peer(action) == peer], self.clock[rank])
            self.queues[rank, peer].append(batch)
            self._match(rank, peer)
        self.unfinished_sends[rank] += [action for action in step if action.kind in SEND_KINDS]
        return True

    def _post_buffered(self, rank: int, step: Step) -> bool:
        for action in step:
            self.posted_at[action] = self.clock[rank]
            if action.kind in SEND_KINDS:
                self.done[action] = self.clock[rank]
            receive = _counterpart(action) if action.kind in SEND_KINDS else action
            if receive in self.posted_at and _counterpart(receive) in self.posted_at:
                self.done[receive] = (
                    max(self.posted_at[receive], self.posted_at[_counterpart(receive)]) + self.costs.p2p
                )
        return True

    def _do_sends(self, rank: int) -> bool:
        waiting = self.unfinished_sends[rank]
        if any(action not in self.done for action in waiting):
            return False
        self.clock[rank] = max([self.clock[rank], *(self.done[action] for action in waiting)])
        waiting.clear()
        return True

    def _do_end(self, rank: int) -> bool:
        self.last_action_end[rank] = self.clock[rank]
        return True

    def _peer(self, action: Action) -> int:
        towards_next = action.kind in ("SEND_F", "RECV_B")
        return self.table.stage_to_rank[action.stage + (1 if towards_next else -1)]

    def _match(self, rank: int, peer: int) -> None:
        """Complete what stands at the head of both queues of a pair of ranks."""
        mine, theirs = (rank, peer), (peer, rank)
        while self.head[mine] < len(self.queues[mine]) and self.head[theirs] < len(self.queues[theirs]):
            a, b = self.queues[mine][self.head[mine]], self.queues[theirs][self.head[theirs]]
            met = [action for action in a.open if _counterpart(action) in b.open]
            if not met:
                raise ScheduleError(
                    f"ranks {rank} and {peer} wait for each other: {[str(x) for x in a.open]} against "
                    f"{[str(x) for x in b.open]}"
                )
            for action in met:
                self.done[action] = self.done[_counterpart(action)] = max(a.posted, b.posted) + self.costs.p2p
                a.open.remove(action)
                b.open.remove(_counterpart(action))
            self.head[mine] += not a.open
            self.head[theirs] += not b.open

    def _spend(self, rank: int, label: str, start: float, seconds: float) -> None:
        self.clock[rank] = start + seconds
        self.spans.append(Span(rank, label, start, self.clock[rank]))

    # -- taps

    def _do_put(self, rank: int, stage: int, m: int) -> bool:
        assert self.taps is not None
        if m != self.num_put[stage]:
            raise ScheduleError(f"stage {stage} puts microbatch {m} where {self.num_put[stage]} is next")
        if stage not in self.taps.local_stages:
            slots = self.taps.slots[stage]
            if slots is not None and m >= slots:  # at most ``slots`` sends of a stage are under way
                arrival = self.arrived.get((stage, m - slots))
                if arrival is None:
                    return False
                self.clock[rank] = max(self.clock[rank], arrival)
        self.put_time[stage, m] = self.clock[rank]
        self.num_put[stage] += 1
        self.peak[stage] = max(self.peak[stage], self.num_put[stage] - len(self.freed[stage]))
        self._deliver(rank)
        return True

    def _deliver(self, source_rank: int) -> None:
        """Post receives while their slots are free, in the link's order, and complete those that were
        sent."""
        assert self.taps is not None
        for stage, m in self.taps.links.get(source_rank, ()):
            if (stage, m) in self.arrived:
                continue
            slots, freed = self.taps.slots[stage], self.freed[stage]
            if slots is not None and m - len(freed) >= slots:
                return
            if (stage, m) not in self.put_time:
                return
            slot_free = freed[m - slots] if slots is not None and m >= slots else 0.0
            self.arrived[stage, m] = max(self.put_time[stage, m], slot_free) + self.costs.tap

    def _do_get(self, rank: int, m: int) -> bool:
        assert self.taps is not None
        if m >= self.hold_get:
            return False
        ready = self.clock[rank]
        for stage in self.taps.slots:
            if (stage, m) not in self.arrived:
                return False
            ready = max(ready, self.arrived[stage, m])
        for stage in self.taps.local_stages:
            if (stage, m) not in self.put_time:
                raise ScheduleError(f"rank {rank} gets microbatch {m} before its own stage {stage} put it")
        self.clock[rank] = ready
        return True

    def _do_draft(self, rank: int, m: int) -> bool:
        self._spend(rank, f"draft {m}", self.clock[rank], self.costs.draft)
        return True

    def _do_free(self, rank: int, m: int) -> bool:
        assert self.taps is not None
        for stage in (*self.taps.slots, *self.taps.local_stages):
            if len(self.freed[stage]) != m:
                raise ScheduleError(f"microbatch {m} of stage {stage} is freed where {len(self.freed[stage])} is next")
            self.freed[stage].append(self.clock[rank])
        for source_rank in self.taps.links:
            self._deliver(source_rank)
        return True


@dataclass
class _Batch:
    open: list[Action]
    posted: float


def _counterpart(action: Action) -> Action:
    """The receive that a send meets, and the other way round."""
    if action.kind in SEND_KINDS:
        forward = action.kind == "SEND_F"
        return Action("RECV_F" if forward else "RECV_B", action.stage + (1 if forward else -1), action.microbatch)
    assert action.kind in RECEIVE_KINDS
    forward = action.kind == "RECV_F"
    return Action("SEND_F" if forward else "SEND_B", action.stage - (1 if forward else -1), action.microbatch)


def simulate(
    table: ScheduleTable, taps: TapFlow | None = None, costs: Costs = Costs(), *, buffered: bool = False
) -> Result:
    """Run ``table`` to its end, with ``taps`` beside it. Raises ScheduleError if it cannot reach the end."""
    machine = Machine(table, taps, costs, buffered=buffered)
    machine.run()
    if not machine.finished():
        raise ScheduleError(
            f"{table.name} with {table.num_ranks} ranks and {table.num_microbatches} microbatches waits "
            f"for ever: {machine.stuck()}"
        )
    return Result(max(machine.clock), machine.spans, machine.last_action_end, dict(machine.peak))


def in_flight_maximum(table: ScheduleTable, taps: TapFlow) -> dict[int, int]:
    """Most messages that each source stage can have put and the draft not yet freed, over all timings.

    The draft's get is held back at every microbatch in turn while all ranks run as far as they can. With as
    many slots no put ever waits.
    """
    unbounded = replace(taps, slots={stage: None for stage in taps.slots})
    machine = Machine(table, unbounded, buffered=True)
    most: dict[int, int] = defaultdict(int)
    for m in range(table.num_microbatches):
        machine.hold_get = m
        machine.run()
        for stage in (*taps.slots, *taps.local_stages):
            most[stage] = max(most[stage], machine.num_put[stage] - m)
    machine.hold_get = table.num_microbatches
    machine.run()
    if not machine.finished():
        raise ScheduleError(f"{table.name} waits for ever even without a bound on the slots: {machine.stuck()}")
    return dict(most)
