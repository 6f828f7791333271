"""How the trunk's keys and values reach the other ranks: gathered once, or hop by hop around a ring.

Legend: T rows of this rank, S = C T rows of the pack, H query heads, G key/value heads, D head dim, C ranks.
Unit of the wire: the bytes of one rank's K0 and V0 in the model's dtype.

=========  ==========================  =============================================
transport  forward                     backward
=========  ==========================  =============================================
gather     (C-1), K0|V0 in one buffer  (C-1) elements, reduce-scattered in fp32
ring       (C-1)                       (C-1) for K0|V0 again, C elements of gradients
=========  ==========================  =============================================

Everything here works on local tensors and traces under ``torch.compile``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec.attention import pieces as _pieces  # noqa: F401  registers torchspec::trunk_piece
from torchspec.attention.merge import accumulation_dtype, branch_backward, branch_forward, merge
from torchspec.attention.op import augment_for_lse_gradient
from torchspec.context_parallel.collectives import (
    all_gather_rows,
    reduce_scatter_rows,
    start_send_to_next,
    wait,
)


@dataclass(frozen=True)
class Ring:
    """The ranks that share a pack: how many, which one this is, and their process group's name."""

    size: int
    rank: int
    group: str


def choose_transport(
    wanted: str, *, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, budget_bytes: int
) -> str:
    """The transport for a layer whose pack has ``rows`` padded rows: "auto" gathers where it fits.

    Gathering keeps K0 | V0 of the pack in the model's dtype and, in the backward, their gradient sums in fp32
    (fp64), each with one copy in the other row order for a moment.  Every rank must be given the same budget.
    """
    if wanted in ("gather", "ring"):
        return wanted
    if wanted != "auto":
        raise ValueError(f"trunk_transport is {wanted!r}; choose gather, ring or auto.")
    elements = rows * 2 * kv_heads * head_dim
    needed = elements * dtype.itemsize + 2 * elements * accumulation_dtype(dtype).itemsize
    return "gather" if needed <= budget_bytes else "ring"


def gathered_rows(cu_seqlens: Tensor, rows: int, size: int) -> Tensor:
    """Where each row of the padded pack lies in the concatenation of the ranks' rows: int64 [rows].

    Device arithmetic on ``cu_seqlens`` only; ``rows`` is the padded pack's length.
    """
    cu = cu_seqlens.long()
    row = torch.arange(rows, device=cu.device)
    document = torch.bucketize(row, cu[1:], right=True)
    start = cu[document]
    n = (cu[document + 1] - start) // (2 * size)
    chunk = (row - start) // n
    back = chunk >= size
    rank = torch.where(back, 2 * size - 1 - chunk, chunk)
    return rank * (rows // size) + start // size + back * n + (row - start) % n


def gather_trunk(k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """K0 and V0 of whole documents, in document order: two [S, G, D] views of one buffer."""
    kv = torch.cat([k_TGD, v_TGD], dim=-1)
    if ring.size > 1:
        index = gathered_rows(cu_seqlens, kv.shape[0] * ring.size, ring.size)
        kv = all_gather_rows(kv, ring.size, ring.group).index_select(0, index)
    k_SGD, v_SGD = kv.split(k_TGD.shape[-1], dim=-1)
    return k_SGD, v_SGD


def scatter_trunk_gradient(dk_SGD: Tensor, dv_SGD: Tensor, cu_seqlens: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """This rank's rows of the gradients summed over ranks, in their dtype (fp32 or fp64)."""
    dkv = torch.cat([dk_SGD, dv_SGD], dim=-1)
    if ring.size > 1:
        index = gathered_rows(cu_seqlens, dkv.shape[0], ring.size)
        dkv = reduce_scatter_rows(torch.empty_like(dkv).index_copy(0, index, dkv), ring.size, ring.group)
    dk_TGD, dv_TGD = dkv.split(dk_SGD.shape[-1], dim=-1)
    return dk_TGD.contiguous(), dv_TGD.contiguous()


def ring_forward(q, k0, v0, kb, vb, cu_seqlens, max_seqlen, scale, window, ring: Ring) -> tuple[Tensor, Tensor]:
    """Branch attention with K0|V0 travelling around the ring: (out in q's dtype, lse).

    The next shard is on its way while this one is computed; merges stay in fp32 (fp64).
    """
    kv, dim = torch.cat([k0, v0], dim=-1), k0.shape[-1]
    where = (cu_seqlens, max_seqlen, scale, window, ring.size, ring.rank)
    out = lse = None
    for step in range(ring.size):
        last = step == ring.size - 1
        arriving = None if last else start_send_to_next(kv, ring.rank, ring.size, ring.group)
        o, s = torch.ops.torchspec.trunk_piece(q, *kv.split(dim, dim=-1), *where, (ring.rank - step) % ring.size)
        out, lse = (o, s) if out is None else merge(out, lse, o, s)
        if not last:
            kv = wait(arriving)
    out, lse = branch_forward(q, out, lse, kb, vb, scale)
    return out.to(q.dtype), lse


def ring_backward(
    do, dlse, q, k0, v0, kb, vb, out, lse, cu_seqlens, max_seqlen, scale, window, ring: Ring
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """(dq, dk0, dv0, dkb, dvb) in the accumulation dtype.

    K0|V0 go around again; the gradient of a shard follows it, one hop behind: each rank adds its part to what
    arrived while it computed, and after C hops the sum is home.
    """
    dq_branch, dkb, dvb = branch_backward(do, dlse, q, out, lse, kb, vb, scale)
    dim = q.shape[-1]
    if dlse is not None:
        do, q, k0, v0, out = augment_for_lse_gradient(do, dlse, q, k0, v0, out)
    wide, where = k0.shape[-1], (cu_seqlens, max_seqlen, scale, window, ring.size, ring.rank)
    kv = torch.cat([k0[..., :dim], v0[..., :dim]], dim=-1)
    dq, travelling = dq_branch, None
    for step in range(ring.size):
        last = step == ring.size - 1
        arriving = None if last else start_send_to_next(kv, ring.rank, ring.size, ring.group)
        k, v = kv.split(dim, dim=-1)
        if wide != dim:  # the columns that carry the gradient of lse are constants: they are not sent
            k, v = (torch.cat([x, y[..., dim:]], dim=-1) for x, y in ((k, k0), (v, v0)))
        dq_step, dk, dv = torch.ops.torchspec.trunk_piece_backward(
            do, q, k.contiguous(), v.contiguous(), out, lse, *where, (ring.rank - step) % ring.size
        )
        dkv = torch.cat([dk[..., :dim], dv[..., :dim]], dim=-1)
        if travelling is not None:
            dkv = dkv + wait(travelling)
        travelling = start_send_to_next(dkv, ring.rank, ring.size, ring.group) if ring.size > 1 else dkv
        dq_step = dq_step[..., :dim]
        dq = dq_step if dq is None else dq + dq_step
        if not last:
            kv = wait(arriving)
    dkv = wait(travelling) if ring.size > 1 else travelling
    dk0, dv0 = dkv.split(dim, dim=-1)
    return dq, dk0.contiguous(), dv0.contiguous(), dkb, dvb
