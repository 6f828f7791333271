"""Runs packed microbatches through a policy whose stages lie on the ranks of a pipeline.

Has what ``WholePolicy`` (run.py) has. Every rank of a pipeline makes the same calls; the weights of a tied embedding
live on the first and on the last stage, and their gradients are added before the two equal optimizer steps.

Legend: T rows of a microbatch on this rank, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchspec.pipeline.config import PipelineConfig
from torchspec.pipeline.runner import PipelineRunner, fit_microbatches
from torchspec.policy.model import Policy
from torchspec.policy.run import DraftStep, OnHidden
from torchspec.policy.stages import StagePlan
from torchspec.ranks import Ranks, own_group, waiting

if TYPE_CHECKING:
    from torchspec.data.packing import PackedBatch


class Stage(nn.Module):
    """One stage of the policy as torch's pipeline calls it: rows in, rows out, the layout set before."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.layout: Any = None

    def enter(self, layout: Any) -> None:
        """The microbatch that the next forward belongs to."""
        self.layout = layout

    def tap_points(self) -> Mapping[int, nn.Module]:
        """See ``Policy.tap_points``."""
        return self.policy.tap_points()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [T] or rows [1, T, E] -> rows [1, T, E]: no view, which torch's split backward could not detach."""
        policy = self.policy
        return policy.decode(x if policy.model.tok_embeddings is None else policy.embed(x), self.layout)


class PipelinedPolicy:
    """This rank's part of the policy, among the ranks of its pipeline.

    Args:
        policy: the part that ``plan`` gives to this rank.
        plan: of all stages.
        config: the [pipeline] table.
        tap_ids: taps of the draft; empty without one.
        draft_schedule: "inline" or "deferred".
        ranks: of the run. All of them make this object together.
    """

    lends_taps = equal_rows = equal_count = True

    def __init__(
        self,
        policy: Policy,
        plan: StagePlan,
        config: PipelineConfig,
        *,
        tap_ids: Sequence[int],
        draft_schedule: str,
        ranks: Ranks,
    ) -> None:
        self.policy, self.plan, self.config = policy, plan, config
        self.group, self.rank = ranks.column_group, ranks.pp_rank
        first, last, rank = plan.holders[0], plan.holders[-1], ranks.pp_rank
        self.tied_group = None
        if policy.shape.tie_word_embeddings and first != last:
            pairs = [[column[first], column[last]] for column in ranks.columns]
            self.tied_group = own_group(pairs, config.deadline_s)
        part = plan.part_of(rank)
        self.holds_head = part.head
        self._is_copy = part.head and not part.embed and policy.shape.tie_word_embeddings
        self._head_copy: Tensor | None = None
        self.device = next(policy.parameters()).device
        self.runner = PipelineRunner(
            config,
            {s: Stage(policy.stage(plan.parts[s])) for s, holder in enumerate(plan.holders) if holder == rank},
            stage_of_tap=plan.stage_of_tap(sorted({0, *tap_ids}) if tap_ids else ()),
            columns=ranks.columns,
            group=self.group,
            draft_stage=plan.draft_stage,
            draft_schedule=draft_schedule,
            width=policy.shape.hidden_size,
            dtype=policy.compute_dtype,
            device=self.device,
        )

    @property
    def teacher_head(self) -> Tensor:
        return self.policy.head_weight if self.holds_head else self._head_copy

    def fit_microbatches(self, at_least: int) -> int:
        """The next number of microbatches that the schedule takes."""
        return fit_microbatches(self.config, at_least)

    def run(
        self,
        batches: Sequence[PackedBatch],
        tap_ids: tuple[int, ...] = (),
        *,
        on_hidden: OnHidden | None = None,
        backward: bool = False,
        draft_step: DraftStep | None = None,
        on_start: Callable[[int], None] = lambda m: None,
    ) -> None:
        """See ``WholePolicy.run``. Microbatches and their rows fit the schedule; ``on_start`` may not leave.

        Raises:
            PipelineError: an exchange with another rank failed or passed pipeline.deadline_s.
        """
        self.runner.run(
            [batch.tokens_T for batch in batches],
            [batch.layout for batch in batches],
            loss=on_hidden if backward else None,
            on_output=None if backward else on_hidden,
            draft_step=draft_step,
            with_taps=bool(tap_ids),
            on_start=on_start,
        )

    def share_head(self) -> None:
        """Send the head to the draft's rank, where it is not a parameter. Collective over the pipeline.

        What else a draft reads of another stage's weights, as the rows of a DFlash draft's mask tokens, would travel
        here too: once, before the step.
        """
        source, target = self.plan.holders[-1], self.plan.draft_rank
        if source == target:
            return
        if self.rank == source:
            with waiting(f"send the policy's head to the draft's rank {target} of the pipeline"):
                dist.send(self.policy.head_weight.detach(), group=self.group, group_dst=target)
        elif self.rank == target:
            if self._head_copy is None:
                shape = self.policy.shape
                dtype = next(self.policy.parameters()).dtype
                self._head_copy = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=self.device)
            with waiting(f"get the policy's head from rank {source} of the pipeline"):
                dist.recv(self._head_copy, group=self.group, group_src=source)

    def sum_tied_gradients(self) -> None:
        """Add the embedding's gradient of the first stage and the tied head's of the last, on both."""
        if self.tied_group is None:
            return
        model = self.policy.model
        weight = model.tok_embeddings.weight if model.tok_embeddings is not None else model.lm_head.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        with waiting("add up the gradient of the tied embedding"):
            dist.all_reduce(weight.grad, group=self.tied_group)

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm of the whole model's gradient (0-d), of which ``parameters`` are this rank's; a tied weight counts
        once."""
        copy = self.policy.head_weight if self._is_copy else None
        grads = [p.grad for p in parameters if p.grad is not None and p is not copy]
        square = torch.nn.utils.get_total_norm(grads).square().to(self.device)
        with waiting("add up the gradient's norm over the pipeline"):
            dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def weights(self, include_tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of the whole model, one tensor at a time from the rank that has it."""
        tied = self.policy.shape.tie_word_embeddings and include_tied_head
        seen: set[str] = set()
        for owner in range(self.config.ranks):
            mine = self.policy.hf_weights(include_tied_head=False) if owner == self.rank else None
            for name, tensor in broadcast_weights(mine, owner, self.group, self.device, seen):
                seen.add(name)
                yield name, tensor
                if tied and name == "model.embed_tokens.weight":
                    yield "lm_head.weight", tensor

    def draft_weights(self, weights: Iterator[tuple[str, Tensor]] | None) -> Iterator[tuple[str, Tensor]]:
        """The draft's ``weights`` on every rank; None where the draft is not."""
        return broadcast_weights(weights, self.plan.draft_rank, self.group, self.device)


def broadcast_weights(
    weights: Iterator[tuple[str, Tensor]] | None,
    owner: int,
    group: dist.ProcessGroup,
    device: torch.device,
    known: set[str] | frozenset[str] = frozenset(),
) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of rank ``owner`` of the group, on all its ranks, one after the other; ``known`` ones are left out.

    A tensor is the owner's own memory there, and valid until the next one elsewhere.
    """
    mine = [(name, tensor) for name, tensor in weights if name not in known] if weights is not None else []
    listing = [[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in mine]]
    with waiting(f"hear what weights rank {owner} of the pipeline has"):
        dist.broadcast_object_list(listing, group=group, group_src=owner)
    for place, (name, shape, dtype) in enumerate(listing[0]):
        tensor = mine[place][1].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
        with waiting(f"get {name} from rank {owner} of the pipeline"):
            dist.broadcast(tensor, group=group, group_src=owner)
        yield name, tensor
