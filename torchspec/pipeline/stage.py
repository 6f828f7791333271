"""The draft beside a pipeline schedule: a thin wrapper around the stages of torch.distributed.pipelining.

``CoTrainPipeline`` stands between the schedule and its stages. It replaces seven methods on the stage
*objects* (the schedule object is not touched: same actions, same order, same messages) and in them
- tells the policy which microbatch runs (``on_microbatch``), in the forward and in the backward
  (recomputation needs it too);
- captures the taps by hooks that act only inside that forward (schedules also run a warm-up forward) and puts
  them;
- on the draft's stage gets the taps and runs ``draft_step`` at once (inline), or keeps them until an idle gap
  of the rank or the end of its actions, as the plan says (deferred). Either way the drafts run in the order
  of the microbatches.

The draft's loss never enters the schedule's loss: split backwards (zero-bubble, V schedules) would drop its
gradients. ``draft_step`` runs the draft's forward and backward itself.

Legend: T rows of a microbatch, E hidden size, m a microbatch, M their number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchspec.pipeline.errors import PipelineError, PipelineStalled
from torchspec.pipeline.schedule import COMPUTE_KINDS, table_of
from torchspec.pipeline.tap_channel import TapChannel
from torchspec.pipeline.tap_plan import FINAL_HIDDEN

_COMPUTE_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_MESSAGE_METHODS = {
    "get_fwd_send_ops": "SEND_F",
    "get_fwd_recv_ops": "RECV_F",
    "get_bwd_send_ops": "SEND_B",
    "get_bwd_recv_ops": "RECV_B",
}


class DraftStep(Protocol):
    """What runs on the draft's rank for every microbatch, in order 0..M-1."""

    def __call__(self, microbatch: int, taps: dict[int, Tensor], final_hidden: Tensor) -> None:
        """``taps``: tap id -> [T, E], ascending; ``final_hidden`` [T, E]: the last stage's output. All
        detached; valid during the call only. Runs the draft's forward and backward and keeps what it wants to
        report."""


class CoTrainPipeline:
    """A schedule, its local stages, and the draft beside them. One per pipeline rank.

    ``tap_points``: tap id -> the module, in a stage of this rank, whose first positional input is the tap
    (decoder layer i for tap i, the final norm for the tap after the last layer). ``channel`` None runs the
    pipeline alone. ``draft_step`` is needed on the draft's rank; None there gets and drops the taps.
    ``on_microbatch(stage, m)`` is called before every forward and backward of a microbatch, ``on_output(m,
    output)`` after every forward of the last stage. ``forward_only``: the schedule is one of
    ``forward_only_schedule`` and runs without gradients. ``log``: a list that takes every action and message
    of this rank (see ``entries``).

    Raises PipelineError where the plan and what is given do not fit.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[Any],
        channel: TapChannel | None,
        tap_points: Mapping[int, nn.Module],
        *,
        draft_step: DraftStep | None = None,
        on_microbatch: Callable[[int, int], None] | None = None,
        on_output: Callable[[int, Any], None] | None = None,
        forward_only: bool = False,
        log: list[tuple] | None = None,
    ):
        self.schedule, self.stages, self.channel = schedule, list(stages), channel
        self.on_output, self.forward_only = on_output, forward_only
        self.draft_step, self.on_microbatch, self.log = draft_step, on_microbatch, log
        self.table = table_of(schedule)
        self.rank = self.stages[0].group_rank
        self.draft_seconds = 0.0
        """Host time spent in ``draft_step`` in the last step."""
        self._actions = [action for action in self.table.actions(self.rank) if action.kind in COMPUTE_KINDS]
        self._num_done = self._num_drafted = 0
        self._inside: str | None = None
        self._armed: int | None = None  # the stage whose forward runs, while its taps are wanted
        self._captured: dict[int, Tensor] = {}
        self._with_taps = False
        # Deferred: taps and final hidden of every microbatch.
        self._kept: list[tuple[dict[int, Tensor], Tensor]] = []
        self._needed: set[int] = set()  # stages of this rank that capture taps
        self._stage_of_tap: dict[int, int] = {}
        self._hooks: list[Any] = []
        if channel is not None:
            self._check_plan(channel, tap_points)
            for tap, module in tap_points.items():
                self._hook(tap, module)
        for stage in self.stages:
            self._interpose(stage)

    # -- a step

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        taps: bool = True,
        **kwargs: Any,
    ) -> None:
        """One step of the schedule with the draft beside it; the arguments are those of ``schedule.step``.

        ``taps=False`` runs the schedule alone. Raises PipelineError (its subclasses say who waited for what),
        and whatever the policy, its loss or the draft raises.
        """
        self._with_taps = taps and self.channel is not None
        self._num_done, self._num_drafted, self._inside, self.draft_seconds = 0, 0, None, 0.0
        self._kept.clear()
        start = time.monotonic()
        if self._with_taps:
            assert self.channel is not None
            self.channel.begin_step()
        if self.on_microbatch is not None:
            for stage in self.stages:  # a warm-up forward, if the schedule runs one, is like microbatch 0
                self.on_microbatch(stage.stage_index, 0)
        try:
            with torch.set_grad_enabled(not self.forward_only):
                self.schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)
        except RuntimeError as error:
            if isinstance(error, PipelineError) or self._inside is not None or not _is_exchange(error):
                raise
            raise self._stalled(error, time.monotonic() - start) from error
        if self._with_taps:
            self._after_last_action()

    def _after_last_action(self) -> None:
        """The rank's own actions are over; other ranks still drain."""
        channel = self.channel
        assert channel is not None
        if channel.is_draft and channel.plan.gets_at_end:
            for m in range(self.table.num_microbatches):
                taps = channel.get(m)
                self._run_draft(m, taps, taps.pop(FINAL_HIDDEN))
                channel.free(m)
        elif channel.is_draft and channel.plan.draft_schedule == "deferred":
            for m in range(self._num_drafted, self.table.num_microbatches):
                self._run_kept(m)
            self._kept.clear()
        channel.end_step()

    def _run_kept(self, m: int) -> None:
        """The deferred draft of microbatch ``m``; its taps are dropped after it."""
        assert self.channel is not None
        (taps, final_hidden), self._kept[m] = self._kept[m], ({}, torch.empty(0))
        self._run_draft(m, taps, final_hidden)
        if self._slots_hold_all():
            self.channel.free(m)

    # -- inside the stages

    def _interpose(self, stage: Any) -> None:
        for name in (*_COMPUTE_METHODS, *_MESSAGE_METHODS):
            if not callable(getattr(stage, name, None)):
                raise PipelineError(
                    f"{type(stage).__name__} has no {name}: this is not a stage of the torch that was read (2.13)."
                )
        forward, backward, weight = (getattr(stage, name) for name in _COMPUTE_METHODS)

        def forward_one_chunk(m: int, *args: Any, **kwargs: Any) -> Any:
            with self._action("F", stage, m):
                if self._with_taps and stage.stage_index in self._needed:
                    self._armed, self._captured = stage.stage_index, {}
                try:
                    output = forward(m, *args, **kwargs)
                finally:
                    self._armed = None
                if self._with_taps:
                    self._after_forward(stage, m, output)
                if self.on_output is not None and stage.is_last:
                    self.on_output(m, output)
                return output

        def backward_one_chunk(m: int, *args: Any, **kwargs: Any) -> Any:
            with self._action("B" if kwargs.get("full_backward", True) else "I", stage, m):
                return backward(m, *args, **kwargs)

        def backward_weight_one_chunk(m: int, *args: Any, **kwargs: Any) -> Any:
            with self._action("W", stage, m):
                return weight(m, *args, **kwargs)

        stage.forward_one_chunk = forward_one_chunk
        stage.backward_one_chunk = backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk
        if self.log is not None:
            for name, kind in _MESSAGE_METHODS.items():
                setattr(stage, name, self._logged(kind, stage, getattr(stage, name)))

    @contextmanager
    def _action(self, kind: str, stage: Any, m: int) -> Iterator[None]:
        self._inside = f"{stage.stage_index}{kind}{m}"
        if self.on_microbatch is not None:
            self.on_microbatch(stage.stage_index, m)
        start = time.perf_counter()
        yield
        self._inside = None
        self._num_done += 1
        if self.log is not None:
            self.log.append((kind, stage.stage_index, m, start, time.perf_counter()))
        if self._with_taps and self.channel is not None and self.channel.is_draft:
            for early in self.channel.plan.draft_after.get(self._num_done, ()):  # deferred, into an idle gap
                self._inside = f"draft {early}"
                self._run_kept(early)
            self._inside = None

    def _logged(self, kind: str, stage: Any, operations_of: Callable[[int], list[dist.P2POp]]) -> Callable[[int], Any]:
        def operations(m: int) -> list[dist.P2POp]:
            made = operations_of(m)
            assert self.log is not None
            messages = tuple(
                (op.op.__name__, op.group_peer, tuple(op.tensor.shape), str(op.tensor.dtype), op.tag) for op in made
            )
            self.log.append((kind, stage.stage_index, m, messages))
            return made

        return operations

    def _hook(self, tap: int, module: nn.Module) -> None:
        home = self._stage_of_tap[tap]

        def capture(_: nn.Module, args: tuple[Any, ...]) -> None:
            if self._armed == home:
                self._captured[tap] = _rows(args[0])

        self._hooks.append(module.register_forward_pre_hook(capture))

    def close(self) -> None:
        """Take the hooks off the tap points; the pipeline sends no taps after this."""
        for hook in self._hooks:
            hook.remove()

    def _after_forward(self, stage: Any, m: int, output: Any) -> None:
        channel = self.channel
        assert channel is not None
        plan, index = channel.plan, stage.stage_index
        if index in plan.taps_of:
            if FINAL_HIDDEN in plan.taps_of[index]:
                self._captured[FINAL_HIDDEN] = _rows(output)
            channel.put(index, m, self._captured)
            self._captured = {}
        if index != plan.draft_stage or plan.gets_at_end:
            return
        taps, final_hidden = channel.get(m), _rows(output)
        if plan.draft_schedule == "inline":
            self._run_draft(m, taps, final_hidden)
            channel.free(m)
        elif self._slots_hold_all():
            self._kept.append((taps, final_hidden))
        else:
            sent = {tap for source in plan.slots for tap in plan.taps_of[source]}
            self._kept.append(
                ({tap: rows.clone() if tap in sent else rows for tap, rows in taps.items()}, final_hidden)
            )
            channel.free(m)

    def _slots_hold_all(self) -> bool:
        """Whether every source has a slot for every microbatch, so that deferred taps can stay where they
        are."""
        assert self.channel is not None
        return all(count == self.table.num_microbatches for count in self.channel.plan.slots.values())

    def _run_draft(self, m: int, taps: dict[int, Tensor], final_hidden: Tensor) -> None:
        self._num_drafted += 1
        if self.draft_step is None:
            return
        start = time.perf_counter()
        with torch.enable_grad():
            self.draft_step(m, taps, final_hidden)
        self.draft_seconds += time.perf_counter() - start
        if self.log is not None:
            self.log.append(("draft", -1, m, start, time.perf_counter()))

    # -- checks and sentences

    def _check_plan(self, channel: TapChannel, tap_points: Mapping[int, nn.Module]) -> None:
        plan = channel.plan
        if plan.table != self.table:
            raise PipelineError(
                f"The tap plan was made for {plan.table.name} with {plan.table.num_ranks} ranks and "
                f"{plan.table.num_microbatches} microbatches; this schedule is {self.table.name} with "
                f"{self.table.num_ranks} and {self.table.num_microbatches}."
            )
        local = [stage.stage_index for stage in self.stages]
        self._needed = {stage for stage in plan.taps_of if stage in local}
        self._stage_of_tap = {
            tap: stage for stage in self._needed for tap in plan.taps_of[stage] if tap != FINAL_HIDDEN
        }
        if set(tap_points) != set(self._stage_of_tap):
            raise PipelineError(
                f"Rank {self.rank} was given modules for the taps {sorted(tap_points)}; its stages {local} "
                f"capture the taps {sorted(self._stage_of_tap)}."
            )
        for tap, module in tap_points.items():
            home = next(stage for stage in self.stages if stage.stage_index == self._stage_of_tap[tap])
            if not any(module is part for part in home.submod.modules()):
                raise PipelineError(f"The module of tap {tap} is not part of stage {home.stage_index}.")

    def _stalled(self, error: Exception, seconds: float) -> PipelineStalled:
        """The sentence for a failed exchange of the pipeline itself: it stood before the rank's next
        action."""
        place = "for its last sends to be taken"
        if self._num_done < len(self._actions):
            action = self._actions[self._num_done]
            forward = action.kind == "F"
            peer_stage = action.stage + (-1 if forward else 1)
            place = f"before {action}"
            if 0 <= peer_stage < self.table.num_stages:
                place = (
                    f"for the {'activation' if forward else 'gradient'} of microbatch {action.microbatch} "
                    f"that stage {action.stage} takes from stage {peer_stage} on rank "
                    f"{self.table.stage_to_rank[peer_stage]}"
                )
        cause = "the deadline of the pipeline's group has passed" if "Timed out" in str(error) else "a rank has ended"
        return PipelineStalled(
            f"Rank {self.rank} (stages {self.table.stages_of(self.rank)}) waited {place}, {seconds:.1f} s "
            f"into the step: {cause}. See the first error of the other ranks."
        )


def entries(log: Sequence[tuple]) -> list[tuple]:
    """The pipeline's own actions and messages in a log, without times and without the draft: what must not
    change."""
    return [entry[:3] if entry[0] in COMPUTE_KINDS else entry for entry in log if entry[0] != "draft"]


def _rows(value: Any) -> Tensor:
    """[T, E] view of a detached activation [..., E]; of a tuple, its first."""
    tensor = value[0] if isinstance(value, (tuple, list)) else value
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _is_exchange(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)
