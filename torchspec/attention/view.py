"""Which rows attend to which: packed documents, whole or as the zigzag shard of one context-parallel rank.

Legend: T rows, C context-parallel size, n = document length / 2C rows of a chunk.

With C ranks every document is cut into 2C chunks of n rows and rank r holds chunks r and 2C-1-r, one after
the other. A kernel is told this by four integers and ``cu_seqlens`` (the documents' borders in the *whole*
pack), so that a CPU kernel may loop over segments and a CUDA kernel may derive everything on the device
without asking the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FULL = -1
"""``TrunkView.k_rank`` of keys that are whole documents in document order."""


@dataclass(frozen=True)
class TrunkView:
    """Queries and keys of one call of a kernel.

    ``cu_seqlens`` int32 [documents + 1] counts rows of the whole pack; ``max_seqlen`` is its longest
    document. Queries are the rows of rank ``q_rank`` out of ``cp_size``; keys are whole documents (``k_rank =
    FULL``) or the rows of rank ``k_rank``.  A key is visible when it lies in the query's document at a
    position not after the query's, and, with ``window > 0``, fewer than ``window`` positions before it.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    window: int = 0
    cp_size: int = 1
    q_rank: int = 0
    k_rank: int = FULL


@dataclass(frozen=True)
class Segment:
    """Consecutive queries against consecutive keys of the same document: first row, first position, count."""

    q_row: int
    q_pos: int
    q_len: int
    k_row: int
    k_pos: int
    k_len: int


def chunks_of(rank: int, cp_size: int) -> tuple[int, int]:
    """The two chunks of every document that ``rank`` holds, in the order in which it holds them."""
    return rank, 2 * cp_size - 1 - rank


def segments(view: TrunkView, q_rows: int, k_rows: int) -> list[Segment]:
    """The pairs of row ranges of ``view`` in which at least one key may be visible (host side: reads
    cu_seqlens).

    ``q_rows``, ``k_rows`` are the rows of the tensors; ValueError when cu_seqlens does not describe them.
    """
    cu = view.cu_seqlens.tolist()
    size = view.cp_size
    held = cu[-1] if view.k_rank == FULL else cu[-1] // size
    if (q_rows, k_rows) != (cu[-1] // size, held):
        raise ValueError(
            f"cu_seqlens end at row {cu[-1]}, which over {size} context-parallel rank(s) makes "
            f"{cu[-1] // size} query and {held} key rows; got {q_rows} and {k_rows}."
        )
    found = []
    for start, end in zip(cu[:-1], cu[1:]):
        length = end - start
        if length == 0:
            continue
        if size == 1:
            found.append(Segment(start, 0, length, start, 0, length))
            continue
        if length % (2 * size):
            raise ValueError(
                f"A document of {length} rows cannot be cut into {2 * size} equal chunks for {size} "
                "context-parallel ranks; pad it with PackedZigzag."
            )
        n = length // (2 * size)
        local = start // size
        for half, chunk in enumerate(chunks_of(view.q_rank, size)):
            q_row = local + half * n
            if view.k_rank == FULL:
                found.append(Segment(q_row, chunk * n, n, start, 0, (chunk + 1) * n))
                continue
            for k_half, k_chunk in enumerate(chunks_of(view.k_rank, size)):
                if k_chunk <= chunk:
                    found.append(Segment(q_row, chunk * n, n, local + k_half * n, k_chunk * n, n))
    return found


def visible_pairs(view: TrunkView, q_rows: int, k_rows: int) -> int:
    """How many (query, key) pairs of ``view`` attend: 4 H D operations each forward, 10 H D backward."""
    window = view.window or view.max_seqlen
    pairs = 0
    for s in segments(view, q_rows, k_rows):
        q = torch.arange(s.q_pos, s.q_pos + s.q_len)
        last = q.clamp_max(s.k_pos + s.k_len - 1)
        first = (q - window + 1).clamp_min(s.k_pos)
        pairs += int((last - first + 1).clamp_min(0).sum())
    return pairs
