"""Runs packed microbatches through a policy that this rank holds whole.

``PipelinedPolicy`` (pipelined.py) is the same for a policy cut into pipeline stages; the learner knows only what both
have. A rank of a pipeline may hold neither the head nor the draft: then its callbacks are never called.

Legend: T rows of a microbatch, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchspec.policy.model import Policy

if TYPE_CHECKING:
    from torchspec.data.packing import PackedBatch

OnHidden = Callable[[int, Tensor], Tensor | None]
"""(microbatch, final-normed rows [T, E]) -> loss, where the head is."""
DraftStep = Callable[[int, dict[int, Tensor], Tensor], None]
"""(microbatch, taps by id [T, E], final-normed rows [T, E]), all detached, where the draft is."""


class WholePolicy:
    """A policy on one rank.

    Attributes:
        holds_head: whether ``on_hidden`` is called on this rank.
        lends_taps: whether a draft step's tensors are valid during its call only.
        equal_rows: whether all microbatches of a run need the same number of rows.
        equal_count: whether all ranks must run equally many microbatches, if need be of padding.
        teacher_head: [V, E], the policy's head for the draft's targets; where the draft is.
        total_norm: gradients' global norm over the ranks that share the model; None: they are all here.
    """

    holds_head = True
    lends_taps = equal_rows = equal_count = False
    total_norm = None

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def teacher_head(self) -> Tensor:
        return self.policy.head_weight

    def fit_microbatches(self, at_least: int) -> int:
        """The next number of microbatches that a run takes."""
        return at_least

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
        """Forward of every microbatch in order; then ``on_hidden``, the backward of what it returned, the draft.

        Args:
            tap_ids: taps that are captured for ``draft_step``.
            on_hidden: must return a scalar loss when ``backward``.
            backward: False runs without gradients.
            on_start: called before a microbatch; may raise to leave.
        """
        for m, batch in enumerate(batches):
            on_start(m)
            with torch.set_grad_enabled(backward):
                out = self.policy(batch.tokens_T, batch.layout, tap_ids)
                loss = on_hidden(m, out.hidden_TE) if on_hidden is not None else None
            if backward:
                loss.backward()
            if draft_step is not None:
                draft_step(m, out.taps, out.hidden_TE.detach())

    def share_head(self) -> None:
        """Bring ``teacher_head`` up to date; nothing to do where the head is a parameter of this rank."""

    def sum_tied_gradients(self) -> None:
        """Add up the gradients of a weight that two ranks hold; there is none."""

    def weights(self, include_tied_head: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of the whole model; all ranks of a pipeline iterate together."""
        return self.policy.hf_weights(include_tied_head)

    def draft_weights(self, weights: Iterator[tuple[str, Tensor]] | None) -> Iterator[tuple[str, Tensor]]:
        """The draft's ``weights`` on every rank; None where the draft is not."""
        assert weights is not None
        return weights
