"""The CUDA kernel's index arithmetic, run on a CPU: varlen flash is replaced by a dense fp64 emulation.

This shows that the right rows meet the right keys, that nothing is read that the kernel may leave unwritten,
and what it costs that the kernel rounds its pieces to bf16.  What it cannot show is that the GPU ops behave as
their schemas say; ``test_branch_attention`` does, where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch

from torchspec.attention import cpu, cuda
from torchspec.attention.merge import merge
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


def _rounded(x, like):
    """What the tensor cores are fed: the second product's operand in the dtype of ``like``."""
    return x.to(like.dtype).double()


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
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for rows, keys, s in scores_of(q, k, cu_q, cu_k, causal, scale, window_size_left):
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        if s.shape[2] == 0:
            out[rows], lse[:, rows] = 0, torch.inf  # what FA2 writes
            continue
        weights = _rounded(torch.exp(s - s.amax(-1, keepdim=True)), out)
        out[rows] = (torch.einsum("hts,shd->thd", weights, values) / weights.sum(-1).T.unsqueeze(-1)).to(out.dtype)
        lse[:, rows] = s.logsumexp(-1)
    return out, lse if out.dtype == torch.float64 else lse.float(), None, None, None


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
    do, q, k, v, out, lse = (x.double() for x in (do, q, k, v, out, lse))
    delta = (do * out).sum(-1)
    for rows, keys, s in scores_of(q, k, cu_q, cu_k, causal, scale, window_size_left):
        if s.shape[1] == 0:
            continue  # garbage stays: the caller may not rely on what is written for keys without queries
        p = torch.exp(s - lse[:, rows].unsqueeze(-1))
        dp = torch.einsum("thd,shd->hts", do[rows], v[keys].repeat_interleave(repeat, 1))
        ds = _rounded(p * (dp - delta[rows].T.unsqueeze(-1)), dq) * scale
        p = _rounded(p, dq)
        dq[rows] = torch.einsum("hts,shd->thd", ds, k[keys].repeat_interleave(repeat, 1)).to(dq.dtype)
        # FA2 writes the gradients of a group's heads one by one, in its dtype, and sums them after
        by_group = lambda x: _rounded(x, dq).unflatten(1, (-1, repeat)).sum(2).to(dq.dtype)  # noqa: E731
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
        cuda.calls_of(TrunkView(layout.cu_seqlens, layout.max_seqlen, 5, 2, 0, 1), layout.num_tokens, layout.num_tokens)


PADDED = [256, 16, 512]
SEED = int(torch.empty((), dtype=torch.int64).random_(2**31))


def in_pieces(inputs, size: int, transport: str, dtype) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole pack from the CUDA arithmetic of every rank, rounded where the ops round."""
    q, k, v, do = (x.to(dtype) for x in inputs)
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, q, k, v)]
    rows_of = {FULL: torch.arange(q.shape[0])} | dict(enumerate(PackedZigzag(PADDED, cp_size=size)._rows_of_rank))
    for rank in range(size):
        layout, mine = PackedZigzag(PADDED, cp_size=size, cp_rank=rank), rows_of[rank]
        held = [FULL] if transport == "gather" else [(rank - step) % size for step in range(size)]
        views = {x: TrunkView(layout.cu_seqlens, layout.max_seqlen, 0, size, rank, x) for x in held}
        out = lse = None
        for keys, view in views.items():
            o, s = cuda.trunk_forward(q[mine], k[rows_of[keys]], v[rows_of[keys]], view, 0.3)
            out, lse = (o, s) if out is None else merge(out, lse, o, s)
        found[0][mine] = out.to(dtype).double()
        for keys, view in views.items():
            shard = (k[rows_of[keys]], v[rows_of[keys]])
            grads = cuda.trunk_backward(do[mine], q[mine], *shard, out.to(dtype), lse, view, 0.3)
            for total, rows, grad in zip(found[1:], (mine, rows_of[keys], rows_of[keys]), grads):
                total[rows] += grad.double()
    return [x.to(dtype).double() for x in found]


@pytest.mark.parity
@pytest.mark.parametrize("transport", ["gather", "ring"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_bf16_pieces(emulated, size, transport):
    """Out and gradients together: at most 1.25 times the error, against fp64, of one call of that kernel in bf16."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = [torch.randn(sum(PADDED), h, DIM, generator=generator).bfloat16() for h in (HEADS, GROUPS, GROUPS, HEADS)]
    exact, alone = (in_pieces(inputs, 1, "gather", x) for x in (torch.float64, torch.bfloat16))
    split = in_pieces(inputs, size, transport, torch.bfloat16)

    def error(found: list[torch.Tensor]) -> float:
        return sum(float((x - want).norm() / want.norm()) ** 2 for x, want in zip(found, exact)) ** 0.5

    ratio = error(split) / error(alone)
    assert ratio < 1.25, f"seed {SEED}: {ratio:.3f} times the error of one call"
