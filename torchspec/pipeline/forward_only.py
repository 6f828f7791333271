"""A schedule that runs forwards only, for passes that need no gradient (log-probabilities under the old
policy).

``schedule.eval()`` of torch 2.13 hangs for ZBVZeroBubble and DualPipeV (one rank raises "can't
steal_bwd_input if this stage doesn't have backward"), and re-initialises its stages at every switch. Here a
twin schedule runs on twin stages over the same modules: torch's own table, reduced to forwards and their
messages. Make it once; training and forward-only steps may alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchspec.pipeline.schedule import rank_of_stages, takes_one_stage

_KEPT = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def forward_only_schedule(name: str, stages: Sequence[Any], num_microbatches: int) -> Any:
    """The forward-only twin of schedule ``name``.

    ``stages``: PipelineStage objects of this rank, of their own (not those of the training schedule), over
    the same modules. Run it as ``CoTrainPipeline(schedule, stages, None, {}, on_output=...,
    forward_only=True)``.
    """
    from torch.distributed.pipelining.schedules import ScheduleGPipe, get_schedule_class

    rank_of_stages(name, stages[0].group_size, len(stages))  # refuses what the schedule does not take
    if takes_one_stage(name):
        # No loss function: its backward half does nothing. But for scale_grads it would divide the gradients that are
        # there.
        return ScheduleGPipe(stages[0], num_microbatches, scale_grads=False)
    schedule = get_schedule_class(name)(list(stages), num_microbatches, scale_grads=False)
    for rank, order in schedule.pipeline_order_with_comms.items():
        flat = [part for entry in order for part in entry.sub_actions or (entry,)]
        schedule.pipeline_order_with_comms[rank] = [part for part in flat if part.computation_type.value in _KEPT]
    return schedule
