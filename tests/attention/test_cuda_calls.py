"""The CUDA kernel's index arithmetic, run on a CPU: varlen flash is replaced by a dense fp64 emulation.

This shows that the right rows meet the right keys and that nothing is read that the kernel may leave
unwritten.  What it cannot show is that the GPU ops behave as their schemas say; ``test_branch_attention``
does, where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch

from torchspec.attention import cpu, cuda
from torchspec.attention.view import FULL, TrunkView
from torchspec.context_parallel.layout import PackedZigzag

LENGTHS, HEADS, GROUPS, DIM = [13, 1, 22], 6, 2, 8


def scores_of(q, k, cu_q, cu_k, causal, scale, left):
    """Per sequence: its rows, its keys and the scores [H, rows, keys], bottom-right masked with -inf."""
    repeat = q.shape[1] // k.shape[1]
    for a, b, c, d in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist()):
        s = torch.einsum("thd,shd->hts", q[a:b], k[c:d].repeat_interleave(repeat, 1)) * scale
        distance = torch.arange(b - a).unsqueeze(1) + (d - c) - (b - a) - torch.arange(d - c)
        hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        if left is not None:
            hidden = hidden | (distance > left)
        yield slice(a, b), slice(c, d), s.masked_fill(hidden, -torch.inf)


def forward(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left=None,
    window_size_right=None,
):
    assert int(torch.diff(cu_q).max()) <= max_q and int(torch.diff(cu_k).max()) <= max_k
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q[-1] == q.shape[0] and cu_k[-1] == k.shape[0]
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    for rows, keys, s in scores_of(q, k, cu_q, cu_k, causal, scale, window_size_left):
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        if s.shape[2] == 0:
            out[rows], lse[:, rows] = 0, torch.inf  # what FA2 writes
            continue
        out[rows] = torch.einsum("hts,shd->thd", s.softmax(-1), values)
        lse[:, rows] = s.logsumexp(-1)
    return out, lse, None, None, None


def backward(
    do,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    causal,
    state,
    unused,
    *,
    scale,
    window_size_left=None,
    window_size_right=None,
):
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    delta = (do * out).sum(-1)
    for rows, keys, s in scores_of(q, k, cu_q, cu_k, causal, scale, window_size_left):
        if s.shape[1] == 0:
            continue  # garbage stays: the caller may not rely on what is written for keys without queries
        p = torch.exp(s - lse[:, rows].unsqueeze(-1))
        dp = torch.einsum("thd,shd->hts", do[rows], v[keys].repeat_interleave(repeat, 1))
        ds = p * (dp - delta[rows].T.unsqueeze(-1)) * scale
        dq[rows] = torch.einsum("hts,shd->thd", ds, k[keys].repeat_interleave(repeat, 1))
        by_group = lambda x: x.unflatten(1, (-1, repeat)).sum(2)  # noqa: E731
        dk[keys] = by_group(torch.einsum("hts,thd->shd", ds, q[rows]))
        dv[keys] = by_group(torch.einsum("hts,thd->shd", p, do[rows]))
    return dq, dk, dv


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(cuda, "_forward", forward)
    monkeypatch.setattr(cuda, "_backward", backward)
    monkeypatch.setattr(cuda, "_check", lambda q: None)


def both(view: TrunkView, rows: int, held: int):
    """(out, lse, dq, dk, dv) of the CUDA arithmetic and of the CPU kernel on the same random tensors."""
    generator = torch.Generator().manual_seed(rows + held)
    make = lambda n, h: torch.randn(n, h, DIM, generator=generator, dtype=torch.float64)  # noqa: E731
    q, do, k, v = make(rows, HEADS), make(rows, HEADS), make(held, GROUPS), make(held, GROUPS)
    found = []
    for kernel in (cuda, cpu):
        out, lse = kernel.trunk_forward(q, k, v, view, 0.3)
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        found.append((out, lse, *kernel.trunk_backward(do, q, k, v, out, seen, view, 0.3)))
    return found


@pytest.mark.parity
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_documents(emulated, size, window):
    for rank in range(size):
        layout = PackedZigzag(LENGTHS, cp_size=size, cp_rank=rank)
        view = TrunkView(layout.cu_seqlens, layout.max_seqlen, window, size, rank, FULL)
        for a, b in zip(*both(view, layout.num_tokens, layout.num_tokens_global)):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_a_ring(emulated, size):
    for rank in range(size):
        for held in range(size):
            layout = PackedZigzag(LENGTHS, cp_size=size, cp_rank=rank)
            view = TrunkView(layout.cu_seqlens, layout.max_seqlen, 0, size, rank, held)
            for a, b in zip(*both(view, layout.num_tokens, layout.num_tokens)):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_a_window_in_a_ring_is_refused(emulated):
    layout = PackedZigzag(LENGTHS, cp_size=2, cp_rank=0)
    with pytest.raises(ValueError, match="needs the gather transport"):
        cuda.calls_of(
            TrunkView(layout.cu_seqlens, layout.max_seqlen, 5, 2, 0, 1), layout.num_tokens, layout.num_tokens
        )
