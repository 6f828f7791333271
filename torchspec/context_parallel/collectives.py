"""The collectives of context parallelism: the only file that names PyTorch's functional collective ops (read:
2.13).

Functional ops trace under ``torch.compile`` and start at once; ``wait`` is called where the result is first
needed, so whatever is computed in between overlaps with the wire.  ``group`` is a process group's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional


def wait(x: Tensor) -> Tensor:
    """The result of a started collective, ready to be read."""
    return _ops.wait_tensor(x)


def all_gather_rows(x: Tensor, size: int, group: str) -> Tensor:
    """[T, ...] of every rank, in rank order: [size * T, ...]."""
    return wait(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter_rows(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's [T, ...] of the sum over ranks of [size * T, ...] (rank order), in x's dtype."""
    return wait(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def start_send_to_next(x: Tensor, rank: int, size: int, group: str) -> Tensor:
    """Starts one hop of a ring: x goes to rank + 1, what ``wait`` returns came from rank - 1 (same shape)."""
    send, receive = [0] * size, [0] * size
    send[(rank + 1) % size] = receive[(rank - 1) % size] = x.shape[0]
    return _ops.all_to_all_single(x.contiguous(), receive, send, group)
