"""This rank's microbatches of an optimizer step: samples packed, equally many on every data-parallel rank.

Legend: T rows of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchspec.collect import Sample
from torchspec.config import Config
from torchspec.context_parallel.transport import choose_transport
from torchspec.data.packing import PackedBatch, Sequence, build_batch, pack, packed_rows
from torchspec.losses.policy import PolicyCounts
from torchspec.ranks import Ranks


@dataclass
class Microbatch:
    """Packed sequences, and what is known of them before the optimizer step (where the policy's head is)."""

    batch: PackedBatch
    old_logp_T: Tensor | None = None
    """The trainer's log-probabilities before the first of several updates; None: those of the step's own forward."""
    ref_logp_T: Tensor | None = None
    """Log-probabilities of the reference; None without rl.kl_coef."""


@dataclass
class Part:
    """What one optimizer step trains on: this rank's microbatches, and counts over all ranks.

    ``live`` ones train the policy, and the draft with it; ``idle`` ones have no advantage and teach the draft only.
    They are packed apart, so that the draft changes nothing for the policy.
    """

    live: list[Microbatch]
    idle: list[Microbatch]
    counts: PolicyCounts
    trains_policy: bool
    trains_draft: bool

    @property
    def microbatches(self) -> list[Microbatch]:
        """All of them, in the order in which they run."""
        return self.live + self.idle


class Packer:
    """Makes the microbatches of this rank.

    ``policy``: a ``WholePolicy`` or ``PipelinedPolicy``, which says what it can run.
    """

    def __init__(self, config: Config, policy: Any, ranks: Ranks) -> None:
        self.config, self.policy, self.ranks = config, policy, ranks

    def part(self, samples: list[Sample], train_draft: bool) -> Part:
        """The microbatches of ``samples``; those without an advantage only when the draft learns from them."""
        live = [s for s in samples if s.live and not s.masked]
        idle = []
        if train_draft and self.config.draft.use_dropped_groups:
            idle = [s for s in samples if (s.masked or not s.live) and s.completion.token_ids]
        counts = PolicyCounts(tokens=sum(len(s.completion.token_ids) for s in live), sequences=len(live))
        return Part(
            self.microbatches(map(_sequence, live)),
            self.microbatches(_sequence(s, trained=False) for s in idle),
            counts,
            bool(live),
            train_draft and bool(live or idle),
        )

    def microbatches(self, sequences: Any) -> list[Microbatch]:
        """This rank's packs. Empty ones are left out, but where every rank must run equally many."""
        sequences, ranks = list(sequences), self.ranks
        multiple = 1 if ranks.cp_size == 1 else 2 * ranks.cp_size
        bins = pack(
            [len(s) for s in sequences],
            self.config.train.tokens_per_microbatch,
            num_ranks=ranks.dp_size,
            pad_multiple=multiple,
            hidden_size=self.policy.policy.shape.hidden_size,
            round_up=self.policy.fit_microbatches,
        )
        sizes = [packed_rows([len(sequences[i]) for i in bin_], multiple) for bin_ in bins]
        fill_to = self._equal_rows(max(sizes, default=0), multiple) if self.policy.equal_rows else 0
        fill_empty = fill_to or (multiple if self.policy.equal_count else 0)
        return [
            Microbatch(
                build_batch(
                    [sequences[i] for i in bin_],
                    next(self.policy.policy.parameters()).device,
                    cp_size=ranks.cp_size,
                    cp_rank=ranks.cp_rank,
                    cp_mesh=ranks.cp_mesh,
                    trunk_transport=self._transport(max(size, fill_to)),
                    fill_to=fill_to if bin_ else fill_empty,
                )
            )
            for bin_, size in list(zip(bins, sizes))[ranks.dp_rank :: ranks.dp_size]
            if bin_ or fill_empty
        ]

    def _equal_rows(self, largest: int, multiple: int) -> int:
        """Rows that all packs are filled to: one of few sizes, so that a pipeline's buffers serve several steps."""
        limit = self.config.train.tokens_per_microbatch
        grain = max(1, limit // 16 // multiple) * multiple
        return min(-(-largest // grain) * grain, limit // multiple * multiple)

    def _transport(self, num_rows: int) -> str:
        """How the trunk travels in a pack of ``num_rows``: by the wider of the policy's and the draft's keys."""
        shape, draft, settings = self.policy.policy.shape, self.config.draft, self.config.parallelism
        heads = [(shape.num_kv_heads, shape.head_dim)]
        if draft.enabled:
            heads.append((draft.num_kv_heads or shape.num_kv_heads, draft.head_dim or shape.head_dim))
        kv_heads, head_dim = max(heads, key=lambda pair: pair[0] * pair[1])
        return choose_transport(
            settings.trunk_transport,
            rows=num_rows,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.policy.policy.compute_dtype,
            budget_bytes=settings.trunk_budget_mb * 2**20,
        )


def _sequence(sample: Sample, trained: bool = True) -> Sequence:
    return Sequence(
        prompt_ids=sample.prompt.token_ids,
        response_ids=sample.completion.token_ids,
        engine_logprobs=sample.completion.logprobs,
        advantage=sample.advantage,
        trained=trained,
    )
