"""Which student row each teacher row teaches, pass by pass.

Legend: T local rows, R rows of the teacher's table, K passes, E hidden, V policy vocabulary.

Row t at pass k predicts x[t+2+k] and is taught by the policy's row t+1+k; it counts where x[t+2+k] is a
trained token of the same document. Seen from the teacher (anchors_KR, -1 = nobody), for one document of six
tokens, all trained:

    teacher row r        0   1   2   3   4   5
    pass 0 teaches      -1   0   1   2   3  -1      (row 5 would predict a token after the end)
    pass 1 teaches      -1  -1   0   1   2  -1
    pass 2 teaches      -1  -1  -1   0   1  -1
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchspec.losses.logits import (
    LogitTransform,
    VocabComm,
    accumulate_dtype,
    chunk_logits,
    finite_bias,
    row_max,
)


def _sources(layout, mask_T: Tensor, num_passes: int, rows_T: Tensor) -> Tensor:
    """[K, T]: for each pass and student row, the value of ``rows_T`` (> 0) at its teacher row; 0 where it has
    none.
    """
    mask_T = mask_T.to(torch.int64)
    sources = [layout.shift(rows_T, 1 + k) * (layout.shift(mask_T, 2 + k) != 0) for k in range(num_passes)]
    return torch.stack(sources)


def teacher_anchors(layout, mask_T: Tensor, num_passes: int) -> Tensor:
    """anchors_KR for a teacher table that is exactly this rank's own rows (R = T).

    Args:
        layout: the pack's layout, one rank (``cp_size == 1``); under context parallelism use
            ``teacher_table``.
        mask_T: mask_T[t] says whether x[t] is a trained token (the predicted token, not the predicting row).
        num_passes: K.
    Returns:
        int64 [K, T]; -1 where a teacher row teaches nobody.
    """
    if layout.cp_size != 1:
        raise ValueError("teacher_anchors needs all rows on this rank; under context parallelism use teacher_table.")
    rows = mask_T.shape[0]
    row_T = torch.arange(rows, device=mask_T.device)
    # Row ids are shifted as id + 1, since a shift past the document's end gives 0. Rows without a teacher are
    # written to a spare column.
    source_KT = _sources(layout, mask_T, num_passes, row_T + 1)
    column_KT = torch.where(source_KT > 0, source_KT - 1, rows)
    anchors = torch.full((num_passes, rows + 1), -1, dtype=torch.int64, device=mask_T.device)
    return anchors.scatter_(1, column_KT, row_T.expand(num_passes, rows))[:, :rows].contiguous()


@torch.no_grad()
def teacher_table(layout, hidden_TE: Tensor, mask_T: Tensor, num_passes: int) -> tuple[Tensor, Tensor]:
    """(table_RE, anchors_KR): this rank's teacher rows and, after them, the few that it needs from others.

    ``hidden_TE`` may be any per-row tensor, [T, ...]: token ids too get a table with the same rows.

    A document's chunk needs up to K policy rows past its end, which under context parallelism live on another
    rank; they arrive by ``layout.shift`` and are appended once, whichever passes use them. Every student row
    is taught on its own rank, so the sums of all ranks add up to the single-rank sums.
    """
    rows = hidden_TE.shape[0]
    if layout.cp_size == 1:
        return hidden_TE.detach(), teacher_anchors(layout, mask_T, num_passes)
    global_T = layout.cu_seqlens.long()[layout.doc_ids_T] + layout.positions_T
    source_KT = _sources(layout, mask_T, num_passes, global_T + 1) - 1
    size = layout.num_tokens_global
    column_of = torch.full((size,), -1, dtype=torch.int64, device=hidden_TE.device)
    column_of[global_T] = torch.arange(rows, device=hidden_TE.device)
    tables, total = [hidden_TE.detach()], rows
    for k in range(num_passes):
        shifted_TE = layout.shift(hidden_TE.detach(), 1 + k)  # every rank takes part, also one that needs nothing
        wanted = (source_KT[k] >= 0) & (column_of[source_KT[k].clamp_min(0)] < 0)
        at = wanted.nonzero().squeeze(1)
        column_of[source_KT[k][at]] = total + torch.arange(at.numel(), device=at.device)
        tables.append(shifted_TE[at])
        total += at.numel()
    anchors = torch.full((num_passes, total), -1, dtype=torch.int64, device=hidden_TE.device)
    for k in range(num_passes):
        taught = (source_KT[k] >= 0).nonzero().squeeze(1)
        anchors[k, column_of[source_KT[k][taught]]] = taught
    return torch.cat(tables), anchors


def draft_index_of_target(d2t: Tensor, vocab_size: int) -> Tensor:
    """[V] int64: draft id of each policy token, -1 for those outside the draft's vocabulary (target = i +
    d2t[i]).
    """
    index = torch.full((vocab_size,), -1, dtype=torch.int64, device=d2t.device)
    ids = torch.arange(d2t.numel(), device=d2t.device)
    index[ids + d2t] = ids
    return index


@torch.no_grad()
def gate_anchors(
    teacher_hidden_RE: Tensor,
    teacher_head_VE: Tensor,
    anchors_KR: Tensor,
    d2t: Tensor | None,
    *,
    target_ids_R: Tensor | None = None,
    transform: LogitTransform | None = None,
    vocab_group: str = "",
    chunk_rows: int = 1024,
) -> Tensor:
    """Anchors without the rows that a gate drops, so that they can be counted before the sweep.

    With ``target_ids_R`` (hard cross-entropy) a row stays where that token is in the draft's vocabulary.
    Without, a row stays where the policy's most likely token is (the position gate): one more pass of the
    policy's head over the rows.
    """
    if d2t is None:
        return anchors_KR
    transform = transform or LogitTransform()
    head = teacher_head_VE.detach().to(teacher_hidden_RE.dtype)
    comm = VocabComm(vocab_group, [head.shape[0]], head.device)
    index_V = draft_index_of_target(d2t, comm.totals[0])
    if target_ids_R is not None:
        keep_R = index_V[target_ids_R.clamp_min(0)] >= 0
        return torch.where(keep_R, anchors_KR, -1)
    dtype = accumulate_dtype(head.dtype)
    transform = transform._replace(bias=finite_bias(transform.bias, dtype))
    rows = (anchors_KR >= 0).any(0).nonzero().squeeze(1)
    out_nV = torch.empty(min(chunk_rows, rows.numel()), head.shape[0], dtype=dtype, device=head.device)
    keep_R = torch.zeros(anchors_KR.shape[1], dtype=torch.bool, device=head.device)
    for part in rows.split(chunk_rows):
        z_nV = chunk_logits(teacher_hidden_RE.detach()[part], head, transform, out_nV[: part.numel()])
        _, top_n = comm.argmax(*row_max(z_nV), head=0)
        keep_R[part] = index_V[top_n] >= 0
    return torch.where(keep_R, anchors_KR, -1)
