"""Trunk attention against the keys of one rank: the ops from which a ring is built.

Legend: T query rows, S key rows, H query heads, G key/value heads, D head dim.

A ring meets the keys shard by shard.  ``torchspec::trunk_piece`` gives the softmax over one shard, to be
merged with the others (``merge``); its backward takes the *joint* (out, lse) and returns that shard's part of
every gradient.
"""

from __future__ import annotations

import torch

from torchspec.attention.kernels import kernel_for
from torchspec.attention.merge import accumulation_dtype
from torchspec.attention.view import TrunkView

_VIEW = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt window, int cp_size, int q_rank, int k_rank"


@torch.library.custom_op(
    "torchspec::trunk_piece",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_VIEW}) -> (Tensor, Tensor)",
)
def trunk_piece(q, k, v, cu_seqlens, max_seqlen, scale, window, cp_size, q_rank, k_rank):
    """Rows of ``q_rank`` against those of ``k_rank``: (out, lse) in fp32 (fp64), lse -inf without a key."""
    view = TrunkView(cu_seqlens, max_seqlen, window, cp_size, q_rank, k_rank)
    out, lse = kernel_for(q).trunk_forward(q, k, v, view, scale)
    return out.contiguous(), lse.contiguous()


@trunk_piece.register_fake
def _(q, k, v, *_where):
    dtype = accumulation_dtype(q.dtype)
    return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)


@torch.library.custom_op(
    "torchspec::trunk_piece_backward",
    mutates_args=(),
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_VIEW}) -> (Tensor, Tensor, Tensor)",
)
def trunk_piece_backward(do, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, window, cp_size, q_rank, k_rank):
    """(dq, dk, dv) of that piece from the joint (out, lse), in the accumulation dtype."""
    view = TrunkView(cu_seqlens, max_seqlen, window, cp_size, q_rank, k_rank)
    grads = kernel_for(q).trunk_backward(do.contiguous(), q, k, v, out, lse, view, scale)
    return tuple(g.to(accumulation_dtype(q.dtype)).contiguous() for g in grads)


@trunk_piece_backward.register_fake
def _(do, q, k, v, *_rest):
    dtype = accumulation_dtype(q.dtype)
    return tuple(x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
