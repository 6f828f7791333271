"""Settings of pipeline parallelism (torch-free). Where the draft lives and when it runs are draft.stage and
draft.schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class PipelineConfig:
    """The policy cut into stages over several ranks."""

    ranks: int = 1
    """Pipeline ranks; 1 runs without a pipeline."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of torch.distributed.pipelining."""
    stages_per_rank: int = 0
    """Stages of a rank; 0 takes what the schedule needs (1 for GPipe and 1F1B, 2 for the others)."""
    layers: tuple[int, ...] = ()
    """Policy layers of each stage; empty balances them by cost, with the draft and the head counted."""
    draft_cost: float = 0.0
    """Cost of the draft for one microbatch, in policy layers, when layers are balanced; 0 estimates it from
    the shapes."""
    tap_slots: int = 0
    """Most tap messages held of one source stage; 0 takes what the schedule can have under way, so no source waits. A
    number with which the schedule could not run is raised to the least that works."""
    deadline_s: float = 240.0
    """Longest wait for a message between pipeline ranks; a longer one ends the run with an error that names
    it."""
