"""Which part of the policy each pipeline stage holds, and where the draft is.

Legend: E hidden, V vocabulary, Vd draft vocabulary, K passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchspec.errors import ConfigError
from torchspec.pipeline.config import PipelineConfig
from torchspec.pipeline.schedule import rank_of_stages
from torchspec.pipeline.split import draft_cost_in_layers, head_cost_in_layers, split_layers
from torchspec.policy.model import PolicyPart
from torchspec.policy.shape import PolicyShape


@dataclass(frozen=True)
class StagePlan:
    """``parts[s]`` is stage s, on pipeline rank ``holders[s]``; the draft is beside stage ``draft_stage``."""

    parts: tuple[PolicyPart, ...]
    holders: tuple[int, ...]
    draft_stage: int

    @property
    def draft_rank(self) -> int:
        """Pipeline rank of the draft."""
        return self.holders[self.draft_stage]

    def part_of(self, rank: int) -> PolicyPart:
        """All that pipeline rank ``rank`` holds."""
        held = [part for part, holder in zip(self.parts, self.holders, strict=True) if holder == rank]
        return PolicyPart(
            tuple(layer for part in held for layer in part.layers),
            any(part.embed for part in held),
            any(part.head for part in held),
        )

    def stage_of_tap(self, tap_ids: Sequence[int]) -> dict[int, int]:
        """Tap id -> the stage that captures it: the one of that layer, for the last tap the one of the head."""
        layer_stage = {layer: stage for stage, part in enumerate(self.parts) for layer in part.layers}
        return {tap: layer_stage.get(tap, len(self.parts) - 1) for tap in tap_ids}


def draft_holder(config: PipelineConfig, draft_stage: int) -> int:
    """Pipeline rank of the draft for ``draft.stage`` (-1 is the last stage).

    Raises ConfigError for a stage that is not there.
    """
    holders = rank_of_stages(config.schedule, config.ranks, config.stages_per_rank)
    if not -1 <= draft_stage < len(holders):
        raise ConfigError(
            f"draft.stage = {draft_stage}: the pipeline has the stages 0 to {len(holders) - 1}; -1 is the last."
        )
    return holders[draft_stage]


def layer_params(shape: PolicyShape) -> int:
    """Weights of one decoder layer's matrices."""
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return shape.hidden_size * (attention + 3 * shape.intermediate_size)


def draft_cost(draft: Any, shape: PolicyShape) -> float:
    """Estimate of a ``Draft``'s cost for one microbatch, in policy layers."""
    draft_vocab = draft.head_weight.shape[0]
    return draft_cost_in_layers(
        layer_params=layer_params(shape),
        draft_params=sum(p.numel() for p in draft.parameters()) - draft.head_weight.numel(),
        num_passes=draft.num_passes,
        vocab=shape.vocab_size,
        draft_vocab=draft_vocab,
        hidden=shape.hidden_size,
    )


def plan_stages(config: PipelineConfig, shape: PolicyShape, draft_stage: int, draft_cost: float) -> StagePlan:
    """Cut the policy: ``pipeline.layers`` as given, else balanced with the head and the draft counted.

    ``draft_cost``: of one microbatch, in policy layers (``pipeline.draft_cost`` goes before it); 0 without a draft.

    Raises ConfigError for layers that are not those of the model, or fewer layers than stages.
    """
    holders = rank_of_stages(config.schedule, config.ranks, config.stages_per_rank)
    num_stages = len(holders)
    counts = list(config.layers)
    if counts and (len(counts) != num_stages or sum(counts) != shape.num_layers or min(counts) < 1):
        raise ConfigError(
            f"pipeline.layers = {counts} must name at least one layer for each of the {num_stages} stages, "
            f"{shape.num_layers} in all; leave it empty to have them balanced."
        )
    if not counts:
        head = head_cost_in_layers(layer_params=layer_params(shape), vocab=shape.vocab_size, hidden=shape.hidden_size)
        counts = split_layers(
            [1.0] * shape.num_layers,
            num_stages,
            last_cost=head,
            draft_cost=(config.draft_cost or draft_cost) if draft_cost else 0.0,
            draft_stage=draft_stage,
        )
    parts, first = [], 0
    for stage, count in enumerate(counts):
        parts.append(PolicyPart(tuple(range(first, first + count)), stage == 0, stage == num_stages - 1))
        first += count
    return StagePlan(tuple(parts), holders, draft_stage % num_stages)
