"""Moving rows to earlier positions when documents are dealt out in zigzag: one batched exchange.

Legend: T rows of this rank, C context-parallel size, n rows of the shift.

A row may need one that lives on any rank (chunks can be shorter than n), so the exchange is an all-to-all
whose sizes follow from the documents' lengths by arithmetic.  Rows that stay on their rank are copied and
never sent.  The backward is the same exchange with the roles of sender and receiver swapped: no row is read
twice, so nothing is summed.

It is an opaque op: its sizes depend on the packing, and a compiled graph must not be remade for each packing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchspec.context_parallel.transport import gathered_rows


@dataclass(frozen=True)
class ShiftPlan:
    """Row indices (int64) and counts per rank of one shift, as seen by one rank."""

    local_to: Tensor
    local_from: Tensor
    send_rows: Tensor
    send_counts: list[int]
    receive_rows: Tensor
    receive_counts: list[int]
    idle: bool
    """No rank sends anything; all ranks know it."""

    def to(self, device: torch.device) -> ShiftPlan:
        rows = [x.to(device, non_blocking=True) for x in (self.local_to, self.local_from, self.send_rows)]
        receive = self.receive_rows.to(device, non_blocking=True)
        return ShiftPlan(*rows, self.send_counts, receive, self.receive_counts, self.idle)


@lru_cache(maxsize=64)
def plan_shift(doc_lengths: tuple[int, ...], n: int, cp_size: int, cp_rank: int, device: torch.device) -> ShiftPlan:
    """Who sends which rows to whom so that row t receives the row n later in its document."""
    real = torch.tensor(doc_lengths)
    padded = (real + 2 * cp_size - 1) // (2 * cp_size) * (2 * cp_size)
    borders = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    held = gathered_rows(borders, int(borders[-1]), cp_size)
    rank, row = held // (len(held) // cp_size), held % (len(held) // cp_size)
    starts = torch.repeat_interleave(padded.cumsum(0) - padded, padded)
    position = torch.arange(len(rank)) - starts
    to = (position + n < torch.repeat_interleave(real, padded)).nonzero().squeeze(1)
    to_rank, to_row, from_rank, from_row = rank[to], row[to], rank[to + n], row[to + n]

    def select(mask: Tensor, peer: Tensor, rows: Tensor) -> tuple[Tensor, list[int]]:
        # both sides order by (peer, receiving row), so the n-th row sent is the n-th row received
        order = torch.argsort(peer[mask] * len(rank) + to_row[mask])
        return rows[mask][order], torch.bincount(peer[mask], minlength=cp_size).tolist()

    mine = to_rank == cp_rank
    stays = mine & (from_rank == cp_rank)
    receive_rows, receive_counts = select(mine & ~stays, from_rank, to_row)
    send_rows, send_counts = select((from_rank == cp_rank) & ~stays, to_rank, from_row)
    idle = not bool((to_rank != from_rank).any())
    plan = ShiftPlan(to_row[stays], from_row[stays], send_rows, send_counts, receive_rows, receive_counts, idle)
    return plan.to(device)


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """One all-to-all of whole rows, as bytes: every dtype travels unchanged."""
    raw = rows.reshape(rows.shape[0], math.prod(rows.shape[1:])).contiguous().view(torch.uint8)
    received = raw.new_empty(sum(receive), raw.shape[1])
    dist.all_to_all_single(received, raw, receive, send, group=_resolve_process_group(group))
    return received.view(rows.dtype).view(sum(receive), *rows.shape[1:])


@torch.library.custom_op(
    "torchspec::zigzag_shift",
    mutates_args=(),
    schema="(Tensor x, Tensor doc_lengths, int n, int cp_size, int cp_rank, str group, bool adjoint) -> Tensor",
)
def zigzag_shift(x, doc_lengths, n, cp_size, cp_rank, group, adjoint):
    """x [T, ...] -> [T, ...]; ``doc_lengths``: real lengths, int64 on the CPU; ``adjoint``: transposed."""
    plan = plan_shift(tuple(doc_lengths.tolist()), n, cp_size, cp_rank, x.device)
    result = torch.zeros_like(x, memory_format=torch.contiguous_format)
    to, source, send_rows, receive_rows = plan.local_to, plan.local_from, plan.send_rows, plan.receive_rows
    send_counts, receive_counts = plan.send_counts, plan.receive_counts
    if adjoint:
        to, source, send_rows, receive_rows = source, to, receive_rows, send_rows
        send_counts, receive_counts = receive_counts, send_counts
    result[to] = x[source]
    if not plan.idle:
        result[receive_rows] = _exchange(x[send_rows], send_counts, receive_counts, group)
    return result


@zigzag_shift.register_fake
def _(x, doc_lengths, n, cp_size, cp_rank, group, adjoint):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    _, doc_lengths, *ctx.scalars, ctx.adjoint = inputs
    ctx.save_for_backward(doc_lengths)


def _backward(ctx, grad):
    (doc_lengths,) = ctx.saved_tensors
    dx = torch.ops.torchspec.zigzag_shift(grad, doc_lengths, *ctx.scalars, not ctx.adjoint)
    return (dx, None, None, None, None, None, None)


zigzag_shift.register_autograd(_backward, setup_context=_setup_context)
