"""Which policy row teaches which draft row, and the distillation loss of the unroll.

Row t at pass k predicts x[t+2+k]; its teacher is the policy's distribution at row t+1+k, detached; it counts
where x[t+2+k] is a trained token of the same document. One document of six tokens, x[3..5] trained, K = 2:

    row t           0     1     2     3     4     5
    pass 0 target   x2    x3    x4    x5    -     -       counts: rows 1, 2, 3   (taught by rows 2, 3, 4)
    pass 1 target   x3    x4    x5    -     -     -       counts: rows 0, 1, 2   (taught by rows 2, 3, 4)

Legend: T tokens, E hidden size, V policy vocabulary, R rows of the teacher's table, K passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchspec.context_parallel.layout import PackedZigzag
    from torchspec.draft.eagle3.model import Eagle3Draft
    from torchspec.losses.distill import DistillOutput


class Targets(NamedTuple):
    """One microbatch's teaching. Made before any loss, which divides by counts of the whole step."""

    hidden_RE: Tensor
    """The policy's final-normed rows, detached."""
    anchors_KR: Tensor
    """int64: the draft row that each teacher row teaches in each pass, -1 for none."""
    next_ids_R: Tensor
    """int64: the token after each teacher row."""
    counts_K: Tensor
    """int64: rows that count in each pass of this microbatch. The loss wants the whole step's sum."""


@torch.no_grad()
def eagle3_count_rows(draft: Eagle3Draft, layout: PackedZigzag, mask_T: Tensor) -> Tensor | None:
    """int64 [K]: rows t whose x[t+2+k] is a trained token; None where a gate drops rows."""
    config = draft.config
    if draft.d2t is not None and (config.objective == "hard_ce" or config.position_gate):
        return None
    trained_T = mask_T.to(torch.int64)
    return torch.stack([(layout.shift(trained_T, 2 + k) != 0).sum() for k in range(draft.num_passes)])


@torch.no_grad()
def eagle3_targets(
    draft: Eagle3Draft,
    policy_hidden_TE: Tensor,
    policy_head_VE: Tensor,
    tokens_T: Tensor,
    mask_T: Tensor,
    layout: PackedZigzag,
    *,
    chunk_rows: int = 1024,
) -> Targets:
    """Teacher rows, anchors and counts of one microbatch, after the gates that the [draft] table asks for.

    Args:
        policy_hidden_TE: input of the policy's head at every row.
        policy_head_VE: the policy's head; read only where the position gate needs the policy's most likely
            token.
        tokens_T: int64 token ids.
        mask_T: 1 where x[t] is a trained token (the predicted token, not the predicting row).
        layout: the pack's documents.
        chunk_rows: rows whose logits exist at one time.
    """
    from torchspec.losses.distill import gate_anchors, teacher_table

    config, passes = draft.config, draft.num_passes
    hidden_RE, anchors_KR = teacher_table(layout, policy_hidden_TE.detach(), mask_T, passes)
    # The same rows as the hidden states': under context parallelism some of them come from other ranks.
    next_ids_R, _ = teacher_table(layout, layout.shift(tokens_T, 1), mask_T, passes)
    if draft.d2t is not None:
        gates = [next_ids_R] if config.objective == "hard_ce" else []
        gates += [None] if config.position_gate else []
        for target_ids_R in gates:
            anchors_KR = gate_anchors(
                hidden_RE,
                policy_head_VE.detach(),
                anchors_KR,
                draft.d2t,
                target_ids_R=target_ids_R,
                chunk_rows=chunk_rows,
            )
    return Targets(hidden_RE, anchors_KR, next_ids_R, (anchors_KR >= 0).sum(dim=1))


def eagle3_loss(
    draft: Eagle3Draft,
    student_hidden: list[Tensor],
    targets: Targets,
    policy_head_VE: Tensor,
    counts_K: Tensor,
    *,
    sampling_temperature: float = 1.0,
    draft_sampling: str = "greedy",
    chunk_rows: int = 1024,
) -> DistillOutput:
    """sum_k alpha_k sum_rows loss / sum_k alpha_k counts_k; the gradient reaches the draft only.

    ``draft.loss_weight`` is left to the caller, who scales the whole step.

    Args:
        student_hidden: what ``draft(taps, embed, layout)`` returned.
        targets: of the same microbatch.
        policy_head_VE: the policy's head, detached here.
        counts_K: rows of each pass over all microbatches and ranks of the optimizer step.
        sampling_temperature: of the rollouts, for the acceptance metrics.
        draft_sampling: how the engine drafts, "greedy" or "probabilistic", for the acceptance metrics.
        chunk_rows: teacher rows whose logits exist at one time.
    """
    from torchspec.losses.distill import distill_loss

    config = draft.config
    return distill_loss(
        targets.hidden_RE,
        policy_head_VE.detach(),
        student_hidden,
        draft.head_weight,
        targets.anchors_KR,
        counts_K,
        pass_weights=tuple(config.pass_weights),
        objective=config.objective,
        temperature=config.temperature,
        sampling_temperature=sampling_temperature,
        draft_sampling=draft_sampling,
        d2t=draft.d2t,
        target_ids_R=targets.next_ids_R if config.objective == "hard_ce" else None,
        position_gate=config.position_gate and draft.d2t is not None,
        chunk_rows=chunk_rows,
    )
