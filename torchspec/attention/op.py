"""``torchspec::branch_attention``: packed causal attention plus, per row, the keys of earlier unroll passes.

Legend: T rows, S key rows (= T on one rank), H query heads, G key/value heads (H a multiple of G), D head
dim, K passes, C context-parallel size.

A query sees the trunk's keys of its document up to itself and, in pass k, the k branch keys of its own row.
For a document of 3 tokens in pass 2::

         trunk   pass 1  pass 2
       a b c     a b c   a b c
    a  1 0 0     1 0 0   1 0 0
    b  1 1 0     0 1 0   0 1 0
    c  1 1 1     0 0 1   0 0 1

One softmax spans both parts: with the trunk's (o_t, lse_t) and branch scores s_i the joint lse is
logsumexp(lse_t, s_1..s_k) and out = e^(lse_t - lse) o_t + sum_i e^(s_i - lse) v_i.  The backward of the
trunk's kernel, called with the joint (out, lse), is exact.  With no branch the op is ordinary packed causal
attention.

The op saves references to its inputs and one (out, lse) per call, so the memory of K passes is linear in K.
The DTensor handlers that make it context parallel live in ``torchspec.context_parallel.dispatch``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchspec.attention.kernels import kernel_for
from torchspec.attention.merge import accumulation_dtype, branch_backward, branch_forward
from torchspec.attention.view import TrunkView

_COMMON = "Tensor cu_seqlens, SymInt max_seqlen, float scale, SymInt window, int cp_size, int cp_rank, str transport"
_FORWARD_SCHEMA = (
    f"(Tensor q, Tensor k0, Tensor v0, Tensor[] kb, Tensor[] vb, Tensor[] carriers, {_COMMON}) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor do, Tensor? dlse, Tensor q, Tensor k0, Tensor v0, Tensor[] kb, Tensor[] vb, Tensor out, "
    f"Tensor lse, bool wide, {_COMMON}) -> (Tensor, Tensor, Tensor, Tensor[], Tensor[])"
)


@torch.library.custom_op("torchspec::branch_attention", mutates_args=(), schema=_FORWARD_SCHEMA)
def branch_attention_op(
    q, k0, v0, kb, vb, carriers, cu_seqlens, max_seqlen, scale, window, cp_size, cp_rank, transport
):
    """The op itself, on local tensors; ``branch_attention`` below is what models call.

    ``cp_size``/``cp_rank`` other than 1/0: q, kb, vb are that rank's rows, k0, v0 are whole documents.
    ``carriers`` is empty, or fp32 (fp64) tensors shaped like [k0, v0, *kb, *vb] that receive those gradients
    instead, unrounded. ``transport`` is read by the DTensor handler only.
    """
    view = TrunkView(cu_seqlens, max_seqlen, window, cp_size, cp_rank)
    out, lse = kernel_for(q).trunk_forward(q, k0, v0, view, scale)
    out, lse = branch_forward(q, out, lse, kb, vb, scale)
    return out.to(q.dtype).contiguous(), lse.contiguous()


@branch_attention_op.register_fake
def _(q, k0, v0, kb, vb, carriers, cu_seqlens, max_seqlen, scale, window, cp_size, cp_rank, transport):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))


def augment_for_lse_gradient(do, dlse, q, k0, v0, out):
    """Widens the head dim by 8 so that a plain flash backward also propagates the gradient of lse.

    d lse / d s_j = p_j, so ds_j = p_j (do . v_j + dlse - do . out): a column of ones in v against dlse in do,
    and 0 in out, does that exactly.  8 columns, because CUDA kernels want head dims in multiples of 8.
    """
    columns = torch.zeros(8, dtype=q.dtype, device=q.device)
    one = columns.clone()
    one[0] = 1
    zeros_q = columns.expand(*q.shape[:2], 8)
    zeros_k = columns.expand(*k0.shape[:2], 8)
    dlse_column = dlse.to(do.dtype).unsqueeze(-1) * one.to(do.dtype)
    return (
        torch.cat([do, dlse_column], -1),
        torch.cat([q, zeros_q], -1),
        torch.cat([k0, zeros_k.to(k0.dtype)], -1),
        torch.cat([v0, one.to(v0.dtype).expand(*v0.shape[:2], 8)], -1),
        torch.cat([out, zeros_q.to(out.dtype)], -1),
    )


@torch.library.custom_op("torchspec::branch_attention_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def branch_attention_backward_op(do, dlse, q, k0, v0, kb, vb, out, lse, wide, *where):
    """(dq, dk0, dv0, dkb, dvb) from the joint (out, lse); ``wide``: all but dq in fp32 (fp64).

    ``where``: the arguments of the forward that are not q, keys or values (``_COMMON``), in its order.
    """
    cu_seqlens, max_seqlen, scale, window, cp_size, cp_rank, _ = where
    view = TrunkView(cu_seqlens, max_seqlen, window, cp_size, cp_rank)
    do, dim = do.contiguous(), q.shape[-1]
    dq_branch, dkb, dvb = branch_backward(do, dlse, q, out, lse, kb, vb, scale)
    padded = (do, q, k0, v0, out) if dlse is None else augment_for_lse_gradient(do, dlse, q, k0, v0, out)
    dq, dk0, dv0 = kernel_for(q).trunk_backward(*padded, lse, view, scale)
    if dlse is not None:
        dq, dk0, dv0 = dq[..., :dim], dk0[..., :dim], dv0[..., :dim]
    if dq_branch is not None:
        dq = dq.to(dq_branch.dtype) + dq_branch
    dtype = accumulation_dtype(q.dtype) if wide else q.dtype
    finish = lambda x: x.to(dtype).contiguous()  # noqa: E731
    return (
        dq.to(q.dtype).contiguous(),
        finish(dk0),
        finish(dv0),
        [finish(x) for x in dkb],
        [finish(x) for x in dvb],
    )


@branch_attention_backward_op.register_fake
def _(do, dlse, q, k0, v0, kb, vb, out, lse, wide, *where):
    dtype = accumulation_dtype(q.dtype) if wide else q.dtype
    like = lambda x: x.new_empty(x.shape, dtype=dtype)  # noqa: E731
    return q.new_empty(q.shape), like(k0), like(v0), [like(x) for x in kb], [like(x) for x in vb]


def _setup_context(ctx, inputs, output):
    q, k0, v0, kb, vb, carriers, cu_seqlens, *ctx.scalars = inputs
    ctx.branches, ctx.num_carriers = len(kb), len(carriers)
    # an unused lse must arrive as None, not as zeros: its gradient costs a wider backward
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k0, v0, *kb, *vb, *output, cu_seqlens)


def _backward(ctx, do, dlse):
    q, k0, v0, *rest = ctx.saved_tensors
    n = ctx.branches
    kb, vb, (out, lse, cu_seqlens) = rest[:n], rest[n : 2 * n], rest[2 * n :]
    no_scalars = (None,) * (1 + len(ctx.scalars))
    if do is None and dlse is None:
        return (None, None, None, [None] * n, [None] * n, [None] * ctx.num_carriers, *no_scalars)
    if do is None:
        do = torch.zeros_like(out)
    dq, dk0, dv0, dkb, dvb = torch.ops.torchspec.branch_attention_backward(
        do, dlse, q, k0, v0, kb, vb, out, lse, ctx.num_carriers > 0, cu_seqlens, *ctx.scalars
    )
    if ctx.num_carriers:
        return (dq, None, None, [None] * n, [None] * n, [dk0, dv0, *dkb, *dvb], *no_scalars)
    return (dq, dk0, dv0, dkb, dvb, [], *no_scalars)


branch_attention_op.register_autograd(_backward, setup_context=_setup_context)


def check_arguments(q_THD, k0_SGD, v0_SGD, kb, vb) -> None:
    """Refuses shapes and dtypes that no kernel can serve, in a sentence."""
    if q_THD.dim() != 3 or k0_SGD.dim() != 3:
        raise ValueError(
            f"branch_attention wants q [T, H, D] and k0 [S, G, D]; got {tuple(q_THD.shape)} and {tuple(k0_SGD.shape)}."
        )
    if k0_SGD.shape != v0_SGD.shape or q_THD.shape[2] != k0_SGD.shape[2]:
        raise ValueError(
            "branch_attention wants k0 and v0 of one shape and q's head dim; got "
            f"q {tuple(q_THD.shape)}, k0 {tuple(k0_SGD.shape)}, v0 {tuple(v0_SGD.shape)}."
        )
    if q_THD.shape[1] % k0_SGD.shape[1]:
        raise ValueError(
            f"{q_THD.shape[1]} query heads do not form equal groups over {k0_SGD.shape[1]} key/value heads; "
            "the number of query heads must be a multiple."
        )
    if len(kb) != len(vb):
        raise ValueError(f"Every branch has a key and a value; got {len(kb)} keys and {len(vb)} values.")
    branch_shape = (q_THD.shape[0], *k0_SGD.shape[1:])
    for x in (*kb, *vb):
        if tuple(x.shape) != branch_shape:
            raise ValueError(f"A branch has one key per query row, {branch_shape}; got {tuple(x.shape)}.")
    dtypes = {x.dtype for x in (q_THD, k0_SGD, v0_SGD, *kb, *vb)}
    if len(dtypes) > 1:
        raise ValueError(f"q, keys and values must share one dtype; got {sorted(map(str, dtypes))}.")


def branch_attention(
    q_THD: Tensor,
    k0_TGD: Tensor,
    v0_TGD: Tensor,
    kb: list[Tensor],
    vb: list[Tensor],
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    window: int = 0,
    *,
    carriers: list[Tensor] | None = None,
    transport: str = "gather",
) -> tuple[Tensor, Tensor]:
    """Attention over the packed trunk and each row's own branch keys.

    Args:
        q_THD, k0_TGD, v0_TGD: one dtype; on CPU fp64/fp32/bf16/fp16, on CUDA bf16/fp16.
        kb, vb: branch keys and values of passes 1..k, each [T, G, D]; empty lists give packed causal
            attention.
        cu_seqlens: int32 [documents + 1], the documents' borders (``PackedZigzag.cu_seqlens``), a plain
            tensor.
        max_seqlen: the longest document; scale: factor of the scores; window: visible trunk keys incl. self,
            0 = all.
        carriers: see ``torchspec.context_parallel.trunk``, which passes them; transport: how the trunk
            travels between context-parallel ranks when the tensors are DTensors, "gather", "ring" or
            "gathered".

    Plain tensors are whole packs on one rank.  DTensors sharded by rows over a context-parallel mesh go to
    the handler of ``torchspec.context_parallel.dispatch``; models use ``Trunk`` and ``packed_attention`` of
    ``torchspec.context_parallel.trunk``, which take this rank's plain rows and serve any number of ranks.

    Returns (out [T,H,D] in q's dtype, lse [T,H] fp32 or fp64); both are differentiable.
    Raises ValueError for shapes, dtypes or devices that cannot be served.
    """
    check_arguments(q_THD, k0_TGD, v0_TGD, kb, vb)
    kb, vb, carriers = list(kb), list(vb), list(carriers or [])
    return torch.ops.torchspec.branch_attention(
        q_THD, k0_TGD, v0_TGD, kb, vb, carriers, cu_seqlens, max_seqlen, scale, window, 1, 0, transport
    )
