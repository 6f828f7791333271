"""From hidden rows to logits, one chunk of rows at a time: what the policy's and the draft's losses share.

Legend: n rows of a chunk, b rows of a block inside it, E hidden, V vocabulary (this rank's slice under TP).

The vocabulary may be split over the ranks of a tensor-parallel group: each rank holds a contiguous slice of
the head's rows and all ranks hold the same hidden rows. A softmax then needs two reductions per chunk, the
maximum and the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Process groups by name. Operators take strings, not group objects, so a caller registers its group once.
_GROUPS: dict[str, dist.ProcessGroup] = {}

# Element-wise work runs on blocks of about this many elements, so that a block stays in a CPU core's cache
# between the handful of operations that touch it.
BLOCK_ELEMENTS = 512 * 1024

_GROUP = 64

# Stands for a logit of minus infinity: its probability is exactly 0 beside any real logit, yet its logarithm,
# which the reverse KL needs, is finite and leaves room for gradients in fp32.
SWITCHED_OFF = -1e6


class LogitTransform(NamedTuple):
    """What a model does between its last hidden state and its softmax: ``cap * tanh(scale * (h W^T + bias) /
    cap)``.
    """

    scale: float = 1.0
    """Factor on the logits (Cohere's logit_scale; 1 / Granite's logits_scaling)."""
    softcap: float = 0.0
    """Final-logit soft cap (Gemma 2); 0 is none."""
    bias: Tensor | None = None
    """[V] bias of the head. Minus infinity switches a token off."""


def register_vocab_group(group: dist.ProcessGroup) -> str:
    """Make a process group known to the losses and return its name, to be passed as ``vocab_group``."""
    _GROUPS[group.group_name] = group
    return group.group_name


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits and sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_rows(width: int, rows: int, device: torch.device, split: bool) -> int:
    """Rows of a block: the whole chunk on an accelerator or when each block would cost a collective."""
    if device.type != "cpu" or split or width == 0:
        return max(rows, 1)
    return max(1, min(rows, BLOCK_ELEMENTS // width))


class VocabComm:
    """The reductions over a vocabulary that is split over ranks; all of them identities without a group.

    ``shard_sizes`` is this rank's number of rows in each head; offsets follow from every rank's sizes.
    """

    def __init__(self, group_name: str, shard_sizes: list[int], device: torch.device):
        self.group = None
        self.offsets = [0] * len(shard_sizes)
        self.totals = list(shard_sizes)
        if not group_name:
            return
        if group_name not in _GROUPS:
            raise ValueError(
                f"Vocabulary group {group_name!r} is unknown here; pass what register_vocab_group returned."
            )
        self.group = _GROUPS[group_name]
        rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
        sizes = torch.zeros(world, len(shard_sizes), dtype=torch.int64, device=device)
        sizes[rank] = torch.tensor(shard_sizes, device=device)
        dist.all_reduce(sizes, group=self.group)
        self.offsets = sizes[:rank].sum(0).tolist()
        self.totals = sizes.sum(0).tolist()

    @property
    def split(self) -> bool:
        return self.group is not None

    def max(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.SUM, group=self.group)
        return x

    def sums(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Reduce several tensors of one shape in one message."""
        if self.group is None:
            return xs
        return self.sum(torch.stack(xs)).unbind(0)

    def argmax(self, value: Tensor, index: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Global maximum and its global index from each rank's own; the lowest index wins a tie."""
        if self.group is None:
            return value, index
        top = self.max(value.clone())
        index = torch.where(value == top, index + self.offsets[head], self.totals[head])
        dist.all_reduce(index, op=dist.ReduceOp.MIN, group=self.group)
        # A NaN row has no winner; any valid index will do, the row is reported as NaN elsewhere.
        return top, index.clamp_(max=self.totals[head] - 1)

    def pick(self, x_nV: Tensor, row_m: Tensor, column_m: Tensor, head: int) -> Tensor:
        """x[row, column] for global column indices; an entry that another rank holds comes from it."""
        if self.group is None:
            return x_nV[row_m, column_m]
        local_m = column_m - self.offsets[head]
        mine_m = (local_m >= 0) & (local_m < x_nV.shape[1])
        picked_m = x_nV.new_zeros(row_m.shape[0])
        picked_m[mine_m] = x_nV[row_m[mine_m], local_m[mine_m]]
        return self.sum(picked_m)


def finite_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias in the dtype of the logits, minus infinity replaced by ``SWITCHED_OFF``: 0 * -inf would be
    NaN.
    """
    if bias is None:
        return None
    return bias.detach().to(dtype).clamp_min(SWITCHED_OFF)


def chunk_logits(hidden_nE: Tensor, head_VE: Tensor, transform: LogitTransform, out_nV: Tensor) -> Tensor:
    """Transformed logits of a chunk in ``out_nV`` (fp32, or fp64 for fp64 inputs); hidden and head share a
    dtype.
    """
    if hidden_nE.dtype == out_nV.dtype:
        torch.mm(hidden_nE, head_VE.t(), out=out_nV)
    else:
        out_nV.copy_(torch.mm(hidden_nE, head_VE.t()))
    if transform.bias is not None:
        out_nV.add_(transform.bias)
    if transform.scale != 1.0:
        out_nV.mul_(transform.scale)
    if transform.softcap:
        out_nV.div_(transform.softcap).tanh_().mul_(transform.softcap)
    return out_nV


def softcap_gradient_(grad_nV: Tensor, capped_nV: Tensor, softcap: float) -> Tensor:
    """Multiply in place by d cap*tanh(z/cap) / dz, told from the capped logits; ``capped_nV`` is
    overwritten.
    """
    return grad_nV.mul_(capped_nV.div_(softcap).square_().neg_().add_(1))


def row_dot(a_nV: Tensor, b_nV: Tensor) -> Tensor:
    """Dot product of each pair of rows."""
    return torch.linalg.vecdot(a_nV, b_nV)


def row_max(x_nV: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row and its index; -inf and 0 for a slice of the vocabulary that is empty."""
    rows, width = x_nV.shape
    if width == 0:
        return x_nV.new_full((rows,), -torch.inf), torch.zeros(rows, dtype=torch.int64, device=x_nV.device)
    groups = width // _GROUP
    if x_nV.device.type != "cpu" or groups < 2:
        return x_nV.max(-1)
    # On a CPU a maximum with its index costs five times one without: take the maxima of groups, then look
    # inside one.
    grouped = x_nV[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    value, group = grouped.amax(2).max(-1)
    index = group * _GROUP + grouped[torch.arange(rows), group].argmax(-1)
    if groups * _GROUP < width:
        tail, at = x_nV[:, groups * _GROUP :].max(-1)
        index = torch.where(tail > value, groups * _GROUP + at, index)
        value = torch.maximum(value, tail)
    return value, index


def row_amax(x_nV: Tensor) -> Tensor:
    """Maximum of each row; -inf for an empty slice of the vocabulary."""
    return x_nV.amax(-1) if x_nV.shape[1] else x_nV.new_full((x_nV.shape[0],), -torch.inf)
