"""Runs packed microbatches through the stages of this rank, with the draft beside the schedule.

The number of microbatches and their rows change from one optimizer step to the next, and a torch schedule has both
fixed: a ``Run`` (schedule, stages of torch over the same modules, tap channel) is made for each pair that comes up and
the newest are kept. The links under the channels are made once.

Legend: T rows of a microbatch on this rank, E hidden size, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchspec.errors import ConfigError
from torchspec.pipeline.config import PipelineConfig
from torchspec.pipeline.forward_only import forward_only_schedule
from torchspec.pipeline.schedule import ScheduleTable, rank_of_stages, schedule_table, table_of, takes_one_stage
from torchspec.pipeline.stage import CoTrainPipeline
from torchspec.pipeline.tap_channel import TapChannel, TapTransport, open_links
from torchspec.pipeline.tap_plan import TapPlan, make_tap_plan

MAX_RUNS = 4


class StageModule(Protocol):
    """One stage: ``forward(x)`` takes tokens [T] (first stage) or rows [1, T, E] and gives rows [1, T, E]."""

    def enter(self, layout: Any) -> None:
        """The microbatch that the next forward or backward belongs to."""

    def tap_points(self) -> Mapping[int, nn.Module]:
        """Tap id -> the module of this stage whose first positional input is the tap."""


def fit_microbatches(config: PipelineConfig, at_least: int) -> int:
    """The smallest number of microbatches, from ``at_least`` on, that the schedule takes.

    Raises ConfigError with the schedule's own reason where none of the next 4 numbers per rank does.
    """
    reason: ConfigError | None = None
    for count in range(max(1, at_least), max(1, at_least) + 4 * config.ranks + 1):
        try:
            schedule_table(config.schedule, config.ranks, count, config.stages_per_rank)
            return count
        except ConfigError as error:
            reason = reason or error
    raise ConfigError(
        f"pipeline.schedule = '{config.schedule}' takes no number of microbatches near {at_least}: {reason}"
    )


class PipelineRunner:
    """This rank's stages of one model, and what is needed to run them.

    Args:
        config: the [pipeline] table.
        stages: stage index -> module, of this rank.
        stage_of_tap: tap id -> stage, for every tap that the draft wants; empty without a draft.
        columns, group: the ranks of every pipeline, and the group of the own one (``torchspec.ranks``).
        draft_stage, draft_schedule: of the [draft] table.
        width: E. dtype: of the rows between stages. device: of all tensors.
    """

    def __init__(
        self,
        config: PipelineConfig,
        stages: Mapping[int, nn.Module],
        *,
        stage_of_tap: Mapping[int, int],
        columns: Sequence[Sequence[int]],
        group: Any,
        draft_stage: int,
        draft_schedule: str,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.stages, self.stage_of_tap = config, dict(stages), dict(stage_of_tap)
        self.columns, self.group = columns, group
        self.draft_stage, self.draft_schedule = draft_stage, draft_schedule
        self.width, self.dtype, self.device = width, dtype, device
        self.num_stages = len(rank_of_stages(config.schedule, config.ranks, config.stages_per_rank))
        self._links: dict[int, TapTransport] | None = None
        self._plans: dict[tuple[int, bool], TapPlan] = {}
        self._runs: dict[tuple, Run] = {}

    def run(
        self,
        tokens: Sequence[Tensor],
        layouts: Sequence[Any],
        *,
        loss: Callable[[int, Tensor], Tensor] | None = None,
        on_output: Callable[[int, Tensor], None] | None = None,
        draft_step: Callable[[int, dict[int, Tensor], Tensor], None] | None = None,
        with_taps: bool = False,
        on_start: Callable[[int], None] = lambda m: None,
    ) -> None:
        """One pass of the schedule over M microbatches of equal rows; every rank of the pipeline calls this alike.

        Args:
            tokens: M tensors int64 [T]; read on the rank of the first stage.
            layouts: M layouts of T rows.
            loss: (microbatch, final rows [T, E]) -> scalar, called on the rank of the last stage and followed by the
                backward; None on every rank runs forwards only, without gradients.
            on_output: (microbatch, final rows [T, E]), on the rank of the last stage, when forwards only run.
            draft_step: on the draft's rank (see ``CoTrainPipeline``); its tensors are valid during the call.
            with_taps: send the taps; the same on every rank.
            on_start: called when this rank comes to a microbatch for the first time.

        Raises:
            PipelineError: an exchange failed or passed pipeline.deadline_s.
        """
        key = (len(tokens), tokens[0].shape[0], loss is not None, with_taps)
        run = self._runs.pop(key, None) or Run(self, *key)
        self._runs[key] = run  # the newest last
        while len(self._runs) > MAX_RUNS:
            self._runs.pop(next(iter(self._runs))).close()
        run.step(tokens, layouts, loss, on_output, draft_step, on_start)

    def plan(self, table: ScheduleTable, train: bool) -> TapPlan:
        """What the channel carries beside ``table``; it depends on the number of microbatches, not on their rows."""
        key = (table.num_microbatches, train)
        if key not in self._plans:
            self._plans[key] = make_tap_plan(
                table,
                self.stage_of_tap,
                draft_stage=self.draft_stage,
                draft_schedule=self.draft_schedule,
                slots=self.config.tap_slots,
            )
        return self._plans[key]

    def links(self, plan: TapPlan) -> dict[int, TapTransport]:
        """The links of the tap channel, made at their first use (by all ranks together)."""
        if self._links is None:
            self._links = open_links(plan, self.columns, device=self.device, deadline_s=self.config.deadline_s)
        return self._links


class Run:
    """A schedule for M microbatches of T rows, on stage objects of its own."""

    def __init__(
        self, runner: PipelineRunner, num_microbatches: int, num_rows: int, train: bool, with_taps: bool
    ) -> None:
        from torch.distributed.pipelining.schedules import get_schedule_class

        self.runner, self.train = runner, train
        config = runner.config
        stages = [self._stage(index, module, num_rows) for index, module in sorted(runner.stages.items())]
        if train:
            schedule = get_schedule_class(config.schedule)(
                stages[0] if takes_one_stage(config.schedule) else stages,
                num_microbatches,
                loss_fn=self._loss,
                scale_grads=False,
            )
        else:
            schedule = forward_only_schedule(config.schedule, stages, num_microbatches)
        channel = self._channel(schedule, num_rows) if with_taps else None
        self.pipeline = CoTrainPipeline(
            schedule,
            stages,
            channel,
            self._tap_points() if with_taps else {},
            draft_step=self._draft,
            on_microbatch=self._enter,
            on_output=None if train else self._output,
            forward_only=not train,
        )
        self.targets = torch.arange(num_microbatches)

    def _stage(self, index: int, module: nn.Module, num_rows: int) -> Any:
        """A stage that knows what it receives: torch would find out by a forward of its own."""
        from torch.distributed.pipelining import PipelineStage

        runner = self.runner
        rows = torch.empty(
            1, num_rows, runner.width, dtype=runner.dtype, device=runner.device, requires_grad=self.train
        )
        tokens = torch.empty(num_rows, dtype=torch.int64, device=runner.device)
        return PipelineStage(
            module,
            index,
            runner.num_stages,
            runner.device,
            input_args=rows if index else tokens,
            output_args=rows,
            group=runner.group,
        )

    def _tap_points(self) -> dict[int, nn.Module]:
        runner = self.runner
        return {
            tap: module
            for index, stage in runner.stages.items()
            for tap, module in stage.tap_points().items()
            if runner.stage_of_tap.get(tap) == index
        }

    def _channel(self, schedule: Any, num_rows: int) -> TapChannel:
        runner, config = self.runner, self.runner.config
        plan = runner.plan(table_of(schedule), self.train)
        return TapChannel(
            plan,
            torch.distributed.get_rank(runner.group),
            runner.links(plan),
            num_rows=num_rows,
            width=runner.width,
            dtype=runner.dtype,
            device=runner.device,
            deadline_s=config.deadline_s,
        )

    def step(
        self,
        tokens: Sequence[Tensor],
        layouts: Sequence[Any],
        loss: Callable | None,
        on_output: Callable | None,
        draft_step: Callable | None,
        on_start: Callable[[int], None],
    ) -> None:
        """See ``PipelineRunner.run``."""
        self.layouts, self.loss, self.on_output = layouts, loss, on_output
        self.draft_step, self.on_start = draft_step, on_start
        self.num_started = 0
        first, last = 0 in self.runner.stages, self.runner.num_stages - 1 in self.runner.stages
        self.pipeline.step(
            *([torch.cat(list(tokens))] if first else []), target=self.targets if last and self.train else None
        )
        self.layouts = self.loss = self.on_output = self.draft_step = None

    def close(self) -> None:
        """Take the hooks off the modules."""
        self.pipeline.close()

    def _enter(self, stage: int, m: int) -> None:
        self.runner.stages[stage].enter(self.layouts[m])
        if m == self.num_started:
            self.num_started += 1
            self.on_start(m)

    def _loss(self, rows_1TE: Tensor, target: Tensor) -> Tensor:
        return self.loss(int(target), rows_1TE[0])

    def _output(self, m: int, rows_1TE: Tensor) -> None:
        if self.on_output is not None:
            self.on_output(m, rows_1TE[0])

    def _draft(self, m: int, taps: dict[int, Tensor], final_hidden_TE: Tensor) -> None:
        if self.draft_step is not None:
            self.draft_step(m, taps, final_hidden_TE)
