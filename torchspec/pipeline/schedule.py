"""What each pipeline rank does, in order: one table for every schedule of torch.distributed.pipelining.

Words: an action is one thing that a rank does for one stage and one microbatch.
  F forward, B full backward, I backward for the input, W backward for the weights;
  SEND_F / RECV_F an activation leaves / arrives, SEND_B / RECV_B a gradient leaves / arrives;
  WAIT_SENDS the rank waits until its sends so far are done.

torch's own tables are not used as they are: GPipe and 1F1B list no sends and receives, and 1F1B's list is
wrong on the last rank (torch 2.13: with 4 ranks and 4 microbatches it has no "3F0" and a "3F4" that does not
exist). These two are written here from what the schedules execute. The others are lowered by torch; their
containers (DualPipeV's overlapped forward and backward) are flattened.

This file is the only one that reads the private tables of torch's schedules (read: torch 2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torchspec.errors import ConfigError

FORWARD_KINDS = ("F",)
COMPUTE_KINDS = ("F", "B", "I", "W")
SEND_KINDS = ("SEND_F", "SEND_B")
RECEIVE_KINDS = ("RECV_F", "RECV_B")


class Action(NamedTuple):
    """One thing that a rank does. ``microbatch`` and ``stage`` are -1 for WAIT_SENDS."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return self.kind if self.kind == "WAIT_SENDS" else f"{self.stage}{self.kind}{self.microbatch}"


Step = tuple[Action, ...]
"""Actions that start together. More than one only where 1F1B fuses a send and a receive into one batch."""


@dataclass(frozen=True)
class ScheduleTable:
    """All that a schedule does: ``steps[rank]`` in the order in which the rank does it."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    steps: tuple[tuple[Step, ...], ...]

    def actions(self, rank: int) -> list[Action]:
        """The actions of ``rank``, steps flattened."""
        return [action for step in self.steps[rank] for action in step]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that ``rank`` holds, ascending."""
        return [stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank]

    def forward_order(self, rank: int, stages: Sequence[int]) -> list[tuple[int, int]]:
        """(stage, microbatch) of the forwards of ``stages`` in the order in which ``rank`` runs them."""
        return [
            (action.stage, action.microbatch)
            for action in self.actions(rank)
            if action.kind == "F" and action.stage in stages
        ]


_STYLES = {
    "GPipe": "single",
    "1F1B": "single",
    "Interleaved1F1B": "loop",
    "LoopedBFS": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
SCHEDULES = tuple(_STYLES)
"""The schedules that torch 2.13 ships, by the names that torch's get_schedule_class takes."""


SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules whose backward is two actions, for the input and for the weights."""


def takes_one_stage(name: str) -> bool:
    """Whether the class of schedule ``name`` is given a stage, not a list of them."""
    return _STYLES[name] == "single"


def rank_of_stages(name: str, num_ranks: int, stages_per_rank: int = 0) -> tuple[int, ...]:
    """The rank of every stage under schedule ``name``. ``stages_per_rank`` 0 takes what the schedule needs (1
    or 2).

    Raises ConfigError for a schedule that torch does not ship and for a number of stages that it does not
    take.
    """
    if name not in _STYLES:
        raise ConfigError(f"There is no pipeline schedule '{name}'; torch ships {', '.join(SCHEDULES)}.")
    style = _STYLES[name]
    per_rank = stages_per_rank or (1 if style == "single" else 2)
    if style == "single" and per_rank != 1:
        raise ConfigError(f"{name} takes one stage a rank, not {per_rank}; Interleaved1F1B takes several.")
    if style == "v" and per_rank != 2:
        raise ConfigError(f"{name} takes two stages a rank, not {per_rank}.")
    if style != "v":
        return tuple(range(num_ranks)) * per_rank
    return tuple(range(num_ranks)) + tuple(reversed(range(num_ranks)))


@cache
def schedule_table(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 0) -> ScheduleTable:
    """The table of schedule ``name``, without processes.

    Raises ConfigError where the schedule does not accept ``num_microbatches`` (torch's own sentence says
    why).
    """
    stage_to_rank = rank_of_stages(name, num_ranks, stages_per_rank)
    if num_microbatches < 1 or num_ranks < 1:
        raise ConfigError(
            f"A pipeline needs at least one rank and one microbatch, not {num_ranks} and {num_microbatches}."
        )
    if _STYLES[name] == "single":
        return _single_table(name, num_ranks, num_microbatches)
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        # The attributes that a schedule's constructor reads of a stage.
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(stage_to_rank),
            group_size=num_ranks,
            group_rank=0,
            submod=torch.nn.Identity(),
        )
        for stage, rank in enumerate(stage_to_rank)
        if rank == 0
    ]
    try:
        schedule = get_schedule_class(name)(stages, num_microbatches, loss_fn=lambda output, target: output)
    except ValueError as error:
        raise ConfigError(
            f"{name} with {num_ranks} ranks does not take {num_microbatches} microbatches: {error}"
        ) from error
    return _lowered_table(name, schedule)


def table_of(schedule: Any) -> ScheduleTable:
    """The table of a live schedule object of torch.distributed.pipelining.

    Raises ConfigError for a schedule class that is not known here.
    """
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

    for kind, name in ((ScheduleGPipe, "GPipe"), (Schedule1F1B, "1F1B")):
        if isinstance(schedule, kind):
            return _single_table(name, schedule._num_stages, schedule._n_microbatches)
    if getattr(schedule, "pipeline_order_with_comms", None):
        return _lowered_table(type(schedule).__name__.removeprefix("Schedule"), schedule)
    raise ConfigError(
        f"{type(schedule).__name__} is no pipeline schedule that taps can be sent beside; use one of "
        f"{', '.join(SCHEDULES)}."
    )


def _lowered_table(name: str, schedule: Any) -> ScheduleTable:
    """The table that torch lowered to compute, sends and receives."""
    wanted = COMPUTE_KINDS + SEND_KINDS + RECEIVE_KINDS
    mapping = schedule.stage_index_to_group_rank
    steps = []
    for rank in range(schedule.pp_group_size):
        actions: list[Step] = []
        for entry in schedule.pipeline_order_with_comms[rank]:
            for action in entry.sub_actions or (entry,):
                if action.computation_type.value in wanted:
                    actions.append(
                        (Action(action.computation_type.value, action.stage_index, action.microbatch_index),)
                    )
        actions.append((Action("WAIT_SENDS", -1, -1),))
        steps.append(tuple(actions))
    return ScheduleTable(
        name,
        schedule.pp_group_size,
        schedule._num_stages,
        schedule._n_microbatches,
        tuple(mapping[stage] for stage in range(schedule._num_stages)),
        tuple(steps),
    )


def _single_table(name: str, num_ranks: int, num_microbatches: int) -> ScheduleTable:
    if name == "1F1B" and num_microbatches < num_ranks:
        raise ConfigError(
            f"1F1B needs at least as many microbatches as pipeline ranks, not {num_microbatches} for "
            f"{num_ranks} ranks; GPipe takes any number."
        )
    write = _gpipe_steps if name == "GPipe" else _1f1b_steps
    steps = tuple(tuple(step for step in write(rank, num_ranks, num_microbatches) if step) for rank in range(num_ranks))
    return ScheduleTable(name, num_ranks, num_ranks, num_microbatches, tuple(range(num_ranks)), steps)


class _Moves:
    """The sends and receives of one stage; empty steps at the ends of the pipeline."""

    def __init__(self, stage: int, num_stages: int):
        self.stage, self.first, self.last = stage, stage == 0, stage == num_stages - 1

    def receive_f(self, m: int) -> Step:
        return () if self.first else (Action("RECV_F", self.stage, m),)

    def send_f(self, m: int) -> Step:
        return () if self.last else (Action("SEND_F", self.stage, m),)

    def receive_b(self, m: int) -> Step:
        return () if self.last else (Action("RECV_B", self.stage, m),)

    def send_b(self, m: int) -> Step:
        return () if self.first else (Action("SEND_B", self.stage, m),)


_WAIT: Step = (Action("WAIT_SENDS", -1, -1),)


def _gpipe_steps(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """All forwards, wait for their sends, all backwards."""
    moves = _Moves(rank, num_ranks)
    steps: list[Step] = []
    for m in range(num_microbatches):
        steps += [moves.receive_f(m), (Action("F", rank, m),), moves.send_f(m)]
    steps.append(_WAIT)
    for m in range(num_microbatches):
        steps += [moves.receive_b(m), (Action("B", rank, m),), moves.send_b(m)]
    return steps + [_WAIT]


def _1f1b_steps(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """As Schedule1F1B executes it: sends and receives between a forward and a backward are fused and waited
    for."""
    moves = _Moves(rank, num_ranks)
    warm_up = min(num_microbatches, num_ranks - rank)
    steps: list[Step] = []
    for m in range(warm_up):
        steps += [moves.receive_f(m), (Action("F", rank, m),), _WAIT]
        if m < warm_up - 1:
            steps.append(moves.send_f(m))
    forward, backward, left_over = warm_up, 0, moves.send_f(warm_up - 1)
    while True:
        steps += [left_over + moves.receive_b(backward), _WAIT, (Action("B", rank, backward),)]
        gradient = moves.send_b(backward)
        backward += 1
        if forward == num_microbatches:
            break
        steps += [gradient + moves.receive_f(forward), _WAIT, (Action("F", rank, forward),)]
        left_over = moves.send_f(forward)
        forward += 1
    steps.append(gradient)
    while backward < num_microbatches:
        steps += [moves.receive_b(backward), (Action("B", rank, backward),), _WAIT, moves.send_b(backward)]
        backward += 1
    return steps + [_WAIT]
