"""DTensor handlers of ``torchspec::branch_attention``: context parallelism without touching a model.

Legend: T rows of this rank, S rows of the pack, H query heads, G key/value heads, D head dim, C ranks of
the cp mesh.

Handlers are registered, at import, in the table of DTensor's dispatcher that PyTorch's own context parallel
uses for SDPA; this is the only file that names it (``_custom_op_handlers``, read in torch 2.13; a test fails
when it moves). They run below autograd and, under ``torch.compile``, are traced.

Placements.  Rows are sharded over the context-parallel mesh dimension (the only one, or the one named
``cp``), in the order of ``PackedZigzag``; over other dimensions all tensors are replicated or all sharded by
heads (tensor parallel). Another placement of a row-sharded tensor or gradient is redistributed.  With
``transport = "gathered"`` k0 and v0 are replicated whole documents in document order, as ``Trunk`` makes
them, and their gradients come back as Partial.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspec.context_parallel.transport import (
    Ring,
    gather_trunk,
    ring_backward,
    ring_forward,
    scatter_trunk_gradient,
)


@dataclass(frozen=True)
class Place:
    """Where the tensors of a call live: mesh, its context-parallel dimension, placements of sharded rows."""

    mesh: DeviceMesh
    dim: int
    rows: tuple[Placement, ...]
    ring: Ring

    def placements(self, cp: Placement) -> tuple[Placement, ...]:
        """Those of the rows, with another placement over the context-parallel dimension."""
        return (*self.rows[: self.dim], cp, *self.rows[self.dim + 1 :])

    def local_rows(self, x: DTensor) -> Tensor:
        """This rank's rows; a tensor that is placed otherwise is redistributed first."""
        return x._local_tensor if x.placements == self.rows else x.redistribute(placements=self.rows)._local_tensor

    def wrap(self, x: Tensor, cp: Placement | None = None) -> DTensor:
        placements = self.rows if cp is None else self.placements(cp)
        return DTensor.from_local(x.contiguous(), self.mesh, placements, run_check=False)


def _cp_dim(mesh: DeviceMesh) -> int:
    if mesh.ndim == 1:
        return 0
    if mesh.mesh_dim_names and "cp" in mesh.mesh_dim_names:
        return mesh.mesh_dim_names.index("cp")
    raise ValueError(f"branch_attention found no context-parallel dimension in {mesh}; name one of them cp.")


def place_of(q, k0, others: list) -> Place:
    """Checks that all are DTensors of one mesh that this op can serve; ValueError says what is wrong."""
    tensors = [q, k0, *others]
    plain = sum(not isinstance(x, DTensor) for x in tensors)
    if plain:
        raise ValueError(
            f"branch_attention got {plain} plain tensor(s) among DTensors; a plain tensor does not say "
            "which rows it holds. Wrap it with DTensor.from_local, or use Trunk / packed_attention, which do."
        )
    mesh = q.device_mesh
    if any(x.device_mesh != mesh for x in tensors):
        raise ValueError("branch_attention got DTensors of different meshes; they must share one.")
    dim = _cp_dim(mesh)
    rows = list(q.placements)
    rows[dim] = Shard(0)
    for other, placement in enumerate(rows):
        if other == dim or placement.is_replicate():
            continue
        if placement != Shard(1):
            raise ValueError(
                f"branch_attention serves tensors that are replicated or sharded by heads beside "
                f"context parallel; q is {placement} over mesh dimension {other}."
            )
        if q.shape[1] % mesh.size(other) or k0.shape[1] % mesh.size(other):
            raise ValueError(
                f"{q.shape[1]} query and {k0.shape[1]} key/value heads cannot be split over "
                f"{mesh.size(other)} tensor-parallel ranks; choose a degree that divides both."
            )
    size = mesh.size(dim)
    if q.shape[0] % size:
        raise ValueError(
            f"{q.shape[0]} rows cannot be dealt out equally to {size} context-parallel ranks; pad them with "
            "PackedZigzag."
        )
    ring = Ring(size, mesh.get_local_rank(dim), mesh.get_group(dim).group_name)
    return Place(mesh, dim, tuple(rows), ring)


def _local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def _whole_documents(k0: DTensor, v0: DTensor, place: Place) -> tuple[Tensor, Tensor]:
    expected = place.placements(Replicate())
    if k0.placements != expected or v0.placements != expected:
        raise ValueError(f"A gathered trunk is placed {expected}; got {k0.placements} and {v0.placements}.")
    return k0._local_tensor, v0._local_tensor


def _check_transport(transport: str) -> None:
    if transport not in ("gather", "ring", "gathered"):
        raise ValueError(f"transport is {transport!r}; branch_attention knows gather, ring and gathered.")


def _check_documents(cu_seqlens: Tensor, rows: int, size: int) -> None:
    """RuntimeError when the documents are not the mesh's rows in 2C chunks; on CUDA it does not wait."""
    fits = (cu_seqlens[-1] == rows) & (torch.diff(cu_seqlens) % (2 * size) == 0).all()
    torch._assert_async(
        fits,
        f"cu_seqlens must end at the mesh's {rows} rows with every document padded to a multiple of "
        f"{2 * size}, so that {size} context-parallel ranks can hold two equal chunks of each; use the "
        "cu_seqlens of PackedZigzag.",
    )


def _forward_handler(op_call, args, kwargs):
    q, k0, v0, kb, vb, _carriers, cu_seqlens, max_seqlen, scale, window, *_, transport = args
    _check_transport(transport)
    place = place_of(q, k0, [v0, *kb, *vb])
    ring, cu_seqlens = place.ring, _local(cu_seqlens)
    if ring.size > 1:
        _check_documents(cu_seqlens, q.shape[0], ring.size)
    q, kb, vb = place.local_rows(q), [place.local_rows(x) for x in kb], [place.local_rows(x) for x in vb]
    if transport == "ring":
        k0, v0 = place.local_rows(k0), place.local_rows(v0)
        out, lse = ring_forward(q, k0, v0, kb, vb, cu_seqlens, max_seqlen, scale, window, ring)
        return place.wrap(out), place.wrap(lse)
    if transport == "gathered":
        k0, v0 = _whole_documents(k0, v0, place)
    else:
        k0, v0 = gather_trunk(place.local_rows(k0), place.local_rows(v0), cu_seqlens, ring)
    out, lse = torch.ops.torchspec.branch_attention(
        q, k0, v0, kb, vb, [], cu_seqlens, max_seqlen, scale, window, ring.size, ring.rank, ""
    )
    return place.wrap(out), place.wrap(lse)


def _backward_handler(op_call, args, kwargs):
    do, dlse, q, k0, v0, kb, vb, out, lse, wide, cu_seqlens, max_seqlen, scale, window, *_, transport = args
    _check_transport(transport)
    place = place_of(q, k0, [v0, *kb, *vb, do, out, lse, *([] if dlse is None else [dlse])])
    ring, cu_seqlens, dtype = place.ring, _local(cu_seqlens), q.dtype
    do, q, out, lse = (place.local_rows(x) for x in (do, q, out, lse))
    dlse = None if dlse is None else place.local_rows(dlse)
    kb, vb = [place.local_rows(x) for x in kb], [place.local_rows(x) for x in vb]
    scalars = (cu_seqlens, max_seqlen, scale, window)
    trunk = Shard(0)
    if transport == "ring":
        k0, v0 = place.local_rows(k0), place.local_rows(v0)
        grads = ring_backward(do, dlse, q, k0, v0, kb, vb, out, lse, *scalars, ring)
    else:
        if transport == "gathered":
            k0, v0 = _whole_documents(k0, v0, place)
        else:
            k0, v0 = gather_trunk(place.local_rows(k0), place.local_rows(v0), cu_seqlens, ring)
        # wide in any case: the trunk's gradients are summed over ranks before they are rounded
        grads = torch.ops.torchspec.branch_attention_backward(
            do, dlse, q, k0, v0, kb, vb, out, lse, True, *scalars, ring.size, ring.rank, ""
        )
        if transport == "gathered":
            trunk = Partial()
        else:
            grads = (grads[0], *scatter_trunk_gradient(grads[1], grads[2], cu_seqlens, ring), *grads[3:])
    dq, dk0, dv0, dkb, dvb = grads
    finish = lambda x, cp=None: place.wrap(x if wide else x.to(dtype), cp)  # noqa: E731
    return (
        place.wrap(dq.to(dtype)),
        finish(dk0, trunk),
        finish(dv0, trunk),
        [finish(x) for x in dkb],
        [finish(x) for x in dvb],
    )


HANDLERS = {
    torch.ops.torchspec.branch_attention.default: _forward_handler,
    torch.ops.torchspec.branch_attention_backward.default: _backward_handler,
}


def register() -> None:
    """Puts the handlers into DTensor's table; repeated calls do no harm (PyTorch's CP may have replaced the
    table).
    """
    DTensor._op_dispatcher._custom_op_handlers.update(HANDLERS)


register()
