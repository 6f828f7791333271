"""What models call: attention over a layout, on any number of context-parallel ranks, with plain tensors.

Legend: T rows of this rank, S rows of the pack, H query heads, G key/value heads, D head dim, C ranks,
K passes.

A draft opens one ``Trunk`` per layer and unroll and calls ``attend`` once a pass; a policy's layer calls
``packed_attention``.  Both take and return this rank's rows.  With ``gather`` a Trunk moves K0/V0 once for
all passes and sums their gradients over the passes in fp32 before they are reduced once.  Autograd would sum
them in the model's dtype: so keys and values enter the op detached, beside *carriers*, fp32 tensors of their
shape without storage, and the op's backward gives the gradients to the carriers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchspec.attention import branch_attention
from torchspec.attention.merge import accumulation_dtype
from torchspec.context_parallel import dispatch as _dispatch  # noqa: F401  registers the DTensor handlers
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.transport import Ring, gather_trunk, scatter_trunk_gradient


def _carrier_like(x: Tensor) -> Tensor:
    """A tensor of x's shape in the accumulation dtype that occupies one element."""
    return torch.zeros((), dtype=accumulation_dtype(x.dtype), device=x.device).expand(x.shape)


class _Carrier(torch.autograd.Function):
    """x -> its carrier; the gradient that the carrier has collected goes to x, rounded once."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return _carrier_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype)


class _GatherTrunk(torch.autograd.Function):
    """This rank's K0, V0 -> those of whole documents and carriers; one reduction, whatever K."""

    @staticmethod
    def forward(ctx, k_TGD, v_TGD, cu_seqlens, ring):
        ctx.ring, ctx.dtype = ring, k_TGD.dtype
        ctx.save_for_backward(cu_seqlens)
        k_SGD, v_SGD = gather_trunk(k_TGD, v_TGD, cu_seqlens, ring)
        ctx.mark_non_differentiable(k_SGD, v_SGD)
        return k_SGD, v_SGD, _carrier_like(k_SGD), _carrier_like(v_SGD)

    @staticmethod
    def backward(ctx, _dk, _dv, dk_SGD, dv_SGD):
        dk_TGD, dv_TGD = scatter_trunk_gradient(dk_SGD, dv_SGD, *ctx.saved_tensors, ctx.ring)
        return dk_TGD.to(ctx.dtype), dv_TGD.to(ctx.dtype), None, None


def _ring_of(layout: PackedZigzag) -> Ring:
    if not layout.cp_group:
        raise ValueError("Attention between context-parallel ranks needs a layout with a cp_mesh.")
    return Ring(layout.cp_size, layout.cp_rank, layout.cp_group)


def _rows(x: Tensor, layout: PackedZigzag) -> DTensor:
    return DTensor.from_local(x, layout.cp_mesh, [Shard(0)], run_check=False)


def _check_rows(q_THD: Tensor, layout: PackedZigzag) -> None:
    if q_THD.shape[0] != layout.num_tokens:
        raise ValueError(f"The layout gives this rank {layout.num_tokens} rows; got q of shape {tuple(q_THD.shape)}.")


def packed_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    layout: PackedZigzag,
    *,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Packed causal attention of one policy layer: [T, H, D]; q, k, v are this rank's rows, one dtype.

    With C > 1 the gathered keys are not kept: they travel again in the backward.  scale defaults to D^-0.5.
    """
    _check_rows(q_THD, layout)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    if layout.cp_size == 1:
        return branch_attention(q_THD, k_TGD, v_TGD, [], [], layout.cu_seqlens, layout.max_seqlen, scale, window)[0]
    _ring_of(layout)
    out_THD, _ = branch_attention(
        *(_rows(x, layout) for x in (q_THD, k_TGD, v_TGD)),
        [],
        [],
        layout.cu_seqlens,
        layout.max_seqlen,
        scale,
        window,
        transport=layout.trunk_transport,
    )
    return out_THD.to_local()


class Trunk:
    """Keys and values of one unroll: pass 0's, then one branch per pass, referenced and never re-stacked.

    Args: layout; scale of the scores (default D^-0.5); window of visible trunk keys incl. self (0: all).
    Use: ``attend`` once per pass, pass 0 first.
    """

    def __init__(self, layout: PackedZigzag, *, scale: float | None = None, window: int = 0):
        self.layout, self.scale, self.window = layout, scale, window
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._carriers: list[tuple[Tensor, Tensor]] = []
        self._transport = "gather"

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Adds this pass's keys and values, then attends: [T, H, D]; all are this rank's rows."""
        layout = self.layout
        _check_rows(q_THD, layout)
        self._open(k_TGD, v_TGD) if not self._keys else self._branch(k_TGD, v_TGD)
        scale = q_THD.shape[-1] ** -0.5 if self.scale is None else self.scale
        # in the order of the op's inputs: k0, v0, all branch keys, all branch values
        trunk, branches = self._carriers[:1], self._carriers[1:]
        flat = [x for pair in trunk for x in pair] + [k for k, _ in branches] + [v for _, v in branches]
        out_THD, _ = branch_attention(
            q_THD if layout.cp_size == 1 else _rows(q_THD, layout),
            self._keys[0],
            self._values[0],
            self._keys[1:],
            self._values[1:],
            layout.cu_seqlens,
            layout.max_seqlen,
            scale,
            self.window,
            carriers=flat,
            transport=self._transport,
        )
        return out_THD if layout.cp_size == 1 else out_THD.to_local()

    def _open(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        layout = self.layout
        if layout.cp_size == 1 or layout.trunk_transport == "ring":
            self._transport = layout.trunk_transport
            self._branch(k_TGD, v_TGD)
            return
        ring = _ring_of(layout)
        self._transport = "gathered"
        k_SGD, v_SGD, *carriers = _GatherTrunk.apply(k_TGD, v_TGD, layout.cu_seqlens, ring)
        whole = lambda x, grad: DTensor.from_local(  # noqa: E731
            x, layout.cp_mesh, [Replicate()], run_check=False, grad_placements=grad
        )
        self._keys.append(whole(k_SGD, None))
        self._values.append(whole(v_SGD, None))
        # each rank holds its own queries' part of the gradient: Partial, which _GatherTrunk reduces
        self._carriers.append(tuple(whole(x, [Partial()]) for x in carriers))

    def _branch(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        layout = self.layout
        if layout.cp_size == 1 and accumulation_dtype(k_TGD.dtype) == k_TGD.dtype:
            self._keys.append(k_TGD)
            self._values.append(v_TGD)
            return
        lift = (lambda x: x) if layout.cp_size == 1 else (lambda x: _rows(x, layout))
        self._keys.append(lift(k_TGD.detach()))
        self._values.append(lift(v_TGD.detach()))
        self._carriers.append((lift(_Carrier.apply(k_TGD)), lift(_Carrier.apply(v_TGD))))
