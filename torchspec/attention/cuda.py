"""Trunk attention on CUDA: PyTorch's varlen flash ops.  Written from their schemas (torch 2.13); it has NOT
been run: the machine it was written on has no GPU.  ``tests/attention`` runs it wherever there is one.

Legend: T query rows, S key rows, H query heads, G key/value heads, D head dim, n rows of a chunk.

A call is a set of sequences (query rows, key rows) with bottom-right causal or no mask.  Everything is
derived from ``cu_seqlens`` on the device; the host only knows ``max_seqlen``, so nothing here waits for the
GPU.  The prefix of each document is not contiguous over documents; it is named without a copy by two
sequences per document, (queries, prefix) and (no query, rest): cu_k = [0, p0, L0, L0 + p1, ...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec.attention.merge import accumulation_dtype, merge
from torchspec.attention.view import FULL, TrunkView, chunks_of

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Call:
    """One varlen call: which query rows (None: all), the sequences' borders, their longest, and the mask."""

    q_rows: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    k_seen: Tensor | None
    """bool [S]: keys that some query sees; gradients of the others are set to zero here."""


def _interleave(a: Tensor, b: Tensor) -> Tensor:
    """[0, a0, a0+b0, a0+b0+a1, ...]: borders of sequences with lengths a0, b0, a1, b1, ..."""
    lengths = torch.stack([a, b], dim=1).flatten()
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _row_in_document(rows: int, borders: Tensor) -> tuple[Tensor, Tensor]:
    """(document, row within it) of each of ``rows`` rows whose documents end at ``borders[1:]``."""
    row = torch.arange(rows, device=borders.device)
    document = torch.bucketize(row, borders[1:].long(), right=True)
    return document, row - borders.long()[document]


def _half_rows(chunk_lengths: Tensor, half: int, rows: int) -> Tensor:
    """Local rows of the front (0) or back (1) chunk of every document; ``rows`` = how many there are."""
    borders = torch.nn.functional.pad(chunk_lengths.cumsum(0), (1, 0))
    document, inside = _row_in_document(rows, borders)
    return 2 * borders[document] + half * chunk_lengths[document] + inside


def calls_of(view: TrunkView, q_rows: int, k_rows: int) -> list[Call]:
    """The varlen calls that cover ``view``; each query row occurs in one or two of them."""
    cu, size = view.cu_seqlens, view.cp_size
    if size == 1:
        return [Call(None, cu, cu, view.max_seqlen, view.max_seqlen, True, None)]
    n = torch.diff(cu).long() // (2 * size)
    max_n, cu_n = view.max_seqlen // (2 * size), torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(torch.int32)
    zero = torch.zeros_like(n)
    if view.k_rank == FULL:
        calls = []
        document, inside = _row_in_document(k_rows, cu)
        for half, chunk in enumerate(chunks_of(view.q_rank, size)):
            prefix = n * (chunk + 1)
            seen = inside < prefix[document]
            calls.append(
                Call(
                    _half_rows(n, half, q_rows // 2),
                    _interleave(n, zero),
                    _interleave(prefix, n * (2 * size) - prefix),
                    max_n,
                    (2 * size) * max_n,
                    True,
                    seen,
                )
            )
        return calls
    if view.window:
        raise ValueError("A sliding window needs the gather transport on CUDA; set trunk_transport to gather.")
    if view.k_rank == view.q_rank:
        return [Call(None, 2 * cu_n, 2 * cu_n, 2 * max_n, 2 * max_n, True, None)]
    if view.k_rank < view.q_rank:  # both chunks see the arriving front chunk
        document, inside = _row_in_document(k_rows, 2 * cu_n)
        return [
            Call(
                None,
                _interleave(2 * n, zero),
                _interleave(n, n),
                2 * max_n,
                max_n,
                False,
                inside < n[document],
            )
        ]
    return [Call(_half_rows(n, 1, q_rows // 2), cu_n, 2 * cu_n, max_n, 2 * max_n, False, None)]


def _check(q_THD: Tensor) -> None:
    if q_THD.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"Flash attention on CUDA serves bfloat16 and float16, not {q_THD.dtype}; set "
            "train.compute_dtype to bfloat16, or run on the CPU, whose kernel serves fp32 and fp64 too."
        )


def _check_rows(view: TrunkView, q_rows: int) -> None:
    """A device-side assertion that cu_seqlens describe these rows; the host does not wait for it."""
    torch._assert_async(
        view.cu_seqlens[-1] == q_rows * view.cp_size,
        f"cu_seqlens do not end at the {q_rows * view.cp_size} rows that q and its {view.cp_size} rank(s) have.",
    )


def _options(view: TrunkView, scale: float) -> dict:
    if view.window:
        return {"scale": scale, "window_size_left": view.window - 1, "window_size_right": 0}
    return {"scale": scale}


def _unseen_to_minus_inf(lse_HT: Tensor) -> Tensor:
    """FA2 writes +inf for a row without keys; a merge needs -inf."""
    return torch.where(lse_HT == torch.inf, -torch.inf, lse_HT)


def _picked(x_T: Tensor, call: Call) -> Tensor:
    """The query rows of ``call``, contiguous."""
    return (x_T if call.q_rows is None else x_T.index_select(0, call.q_rows)).contiguous()


def trunk_forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, view: TrunkView, scale: float) -> tuple[Tensor, Tensor]:
    """See ``torchspec.attention.cpu.trunk_forward``; here the kernel rounds pieces to q's dtype."""
    _check(q_THD)
    _check_rows(view, q_THD.shape[0])
    dtype = accumulation_dtype(q_THD.dtype)
    calls = calls_of(view, q_THD.shape[0], k_SGD.shape[0])
    whole = len(calls) == 1 and calls[0].q_rows is None
    out_THD = None if whole else torch.zeros(q_THD.shape, dtype=dtype, device=q_THD.device)
    lse_TH = None if whole else torch.full(q_THD.shape[:2], -torch.inf, dtype=dtype, device=q_THD.device)
    for c in calls:
        q = q_THD if c.q_rows is None else q_THD.index_select(0, c.q_rows)
        o, lse, *_ = _forward(
            q, k_SGD, v_SGD, c.cu_q, c.cu_k, c.max_q, c.max_k, 0.0, c.causal, False, **_options(view, scale)
        )
        o, lse = o.to(dtype), _unseen_to_minus_inf(lse).transpose(0, 1)
        if whole:
            return o, lse
        rows = slice(None) if c.q_rows is None else c.q_rows
        out_THD[rows], lse_TH[rows] = merge(out_THD[rows], lse_TH[rows], o, lse)
    return out_THD, lse_TH


def trunk_backward(
    do_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    view: TrunkView,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``torchspec.attention.cpu.trunk_backward``; sums over calls are kept in fp32."""
    _check(q_THD)
    dtype = accumulation_dtype(q_THD.dtype)
    total = None
    # without dropout the kernel does not read its random state
    state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q_THD.device)
    do_THD, out_THD = do_THD.to(q_THD.dtype), out_THD.to(q_THD.dtype)
    calls = calls_of(view, q_THD.shape[0], k_SGD.shape[0])
    for c in calls:
        dq, dk, dv = _backward(
            _picked(do_THD, c),
            _picked(q_THD, c),
            k_SGD,
            v_SGD,
            _picked(out_THD, c),
            _picked(lse_TH, c).transpose(0, 1).contiguous(),
            c.cu_q,
            c.cu_k,
            c.max_q,
            c.max_k,
            0.0,
            c.causal,
            state,
            unused,
            **_options(view, scale),
        )
        if len(calls) == 1 and c.q_rows is None and c.k_seen is None:
            return dq, dk, dv
        if c.k_seen is not None:
            dk, dv = (torch.where(c.k_seen[:, None, None], x, torch.zeros_like(x)) for x in (dk, dv))
        if total is None:
            total = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_THD, k_SGD, v_SGD)]
        if c.q_rows is None:
            total[0] += dq
        else:
            total[0].index_add_(0, c.q_rows, dq.to(dtype))
        total[1] += dk
        total[2] += dv
    return tuple(total)
