"""branch_attention against the dense fp64 oracle: values, every gradient, GQA, windows, packing, compile."""

from __future__ import annotations

import math

import pytest
import torch
from torch.library import opcheck

from torchspec.attention import branch_attention, cuda
from torchspec.attention.kernels import kernel_for
from torchspec.attention.oracle import dense_branch_attention, dense_mask
from torchspec.attention.view import TrunkView
from torchspec.context_parallel.layout import PackedZigzag

LENGTHS = [13, 1, 22]
GROUPS, DIM = 2, 16


def make(ratio: int, branches: int, dtype=torch.float64, lengths=LENGTHS, seed: int = 0):
    """q, k0, v0, kb, vb with gradients, and the layout."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)

    def tensor(heads: int) -> torch.Tensor:
        values = torch.randn(rows, heads, DIM, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    trunk = [tensor(GROUPS * ratio), tensor(GROUPS), tensor(GROUPS)]
    return (
        *trunk,
        [tensor(GROUPS) for _ in range(branches)],
        [tensor(GROUPS) for _ in range(branches)],
        PackedZigzag(lengths),
    )


def run(function, q, k0, v0, kb, vb, layout, window=0):
    return function(q, k0, v0, kb, vb, layout.cu_seqlens, layout.max_seqlen, DIM**-0.5, window)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def test_mask_as_drawn():
    """Two documents of 3 and 2 tokens, one branch pass; then the same with a window of 2 keys."""
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    assert dense_mask(cu, 1).int().tolist() == [
        # trunk         pass 1
        [1, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert dense_mask(cu, 0, window=2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_values_by_hand():
    """Equal scores average the visible values, so the op must show exactly the drawn mask."""
    layout = PackedZigzag([3, 2])
    q = torch.zeros(5, 1, 8, dtype=torch.float64)
    k = torch.randn(5, 1, 8, dtype=torch.float64)
    v = torch.arange(5.0, dtype=torch.float64).view(5, 1, 1).expand(5, 1, 8).contiguous()
    branch = 100 + v
    out, lse = branch_attention(q, k, v, [k], [branch], layout.cu_seqlens, 3, 1.0)
    expected = [(0 + 100) / 2, (0 + 1 + 101) / 3, (0 + 1 + 2 + 102) / 4, (3 + 103) / 2, (3 + 4 + 104) / 3]
    torch.testing.assert_close(out[:, 0, 0], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(lse[:, 0], torch.tensor([2.0, 3, 4, 2, 3], dtype=torch.float64).log())


@pytest.mark.parity
@pytest.mark.parametrize("window", [0, 1, 5, 150])
@pytest.mark.parametrize("branches", [0, 1, 3])
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_equals_oracle_in_fp64(ratio, branches, window):
    lengths = [13, 1, 160, 22] if window == 150 else LENGTHS
    *inputs, layout = make(ratio, branches, lengths=lengths, seed=ratio + branches)
    got = run(branch_attention, *inputs, layout, window)
    want = run(dense_branch_attention, *inputs, layout, window)
    for a, b in zip(got, want):
        assert (a - b).abs().max() < 1e-12
    flat = [*inputs[:3], *inputs[3], *inputs[4]]
    weights = [torch.randn_like(x) for x in want]
    losses = (
        lambda out, lse: (out * weights[0]).sum(),
        lambda out, lse: (lse * weights[1]).sum(),
        lambda out, lse: (out * weights[0]).sum() + (lse * weights[1]).sum(),
    )
    for loss in losses:
        grads = [
            torch.autograd.grad(loss(*x), flat, retain_graph=True, allow_unused=True, materialize_grads=True)
            for x in (got, want)
        ]
        for a, b in zip(*grads):
            assert (a - b).abs().max() < 1e-12


@pytest.mark.parity
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_narrow_dtypes(dtype, limit):
    *inputs, layout = make(3, 3, dtype=dtype)
    wide = [
        inputs[0].double(),
        inputs[1].double(),
        inputs[2].double(),
        [x.double() for x in inputs[3]],
        [x.double() for x in inputs[4]],
    ]
    out, lse = run(branch_attention, *inputs, layout)
    want, want_lse = run(dense_branch_attention, *wide, layout)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert relative(out, want) < limit and relative(lse, want_lse) < limit
    flat = [*inputs[:3], *inputs[3], *inputs[4]]
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), flat)
    for a, b in zip(got, torch.autograd.grad((want * weight.double()).sum(), flat)):
        assert a.dtype == dtype and relative(a, b) < limit


@pytest.mark.parity
def test_packed_equals_one_document_at_a_time():
    q, k0, v0, kb, vb, layout = make(3, 2, seed=5)
    out, lse = run(branch_attention, q, k0, v0, kb, vb, layout)
    weight = torch.randn_like(out)
    flat = [q, k0, v0, *kb, *vb]
    packed = torch.autograd.grad((out * weight).sum(), flat)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        part = [x[rows].detach().requires_grad_() for x in flat]
        alone = PackedZigzag([length])
        o, s = run(branch_attention, *part[:3], part[3:5], part[5:], alone)
        torch.testing.assert_close(o, out[rows], atol=1e-12, rtol=0)
        torch.testing.assert_close(s, lse[rows], atol=1e-12, rtol=0)
        for a, b in zip(torch.autograd.grad((o * weight[rows]).sum(), part), packed):
            torch.testing.assert_close(a, b[rows], atol=1e-12, rtol=0)
        start += length


def test_far_away_token_and_no_other_document():
    """The last row's output reaches the first key of its document and nothing else."""
    q, k0, v0, kb, vb, layout = make(1, 1, seed=7)
    out, _ = run(branch_attention, q, k0, v0, kb, vb, layout)
    (dv,) = torch.autograd.grad(out[35].sum(), v0, retain_graph=True)
    seen = dv.abs().amax((1, 2)) > 0
    assert seen.tolist() == [False] * 14 + [True] * 22
    (dv,) = torch.autograd.grad(out[20].sum(), v0, retain_graph=True)
    assert (dv.abs().amax((1, 2)) > 0).tolist() == [False] * 14 + [True] * 7 + [False] * 15
    (dvb,) = torch.autograd.grad(out[20].sum(), vb[0])
    assert (dvb.abs().amax((1, 2)) > 0).nonzero().flatten().tolist() == [20]


@pytest.mark.parametrize("branches", [0, 2])
def test_opcheck(branches):
    q, k0, v0, kb, vb, layout = make(3, branches, lengths=[4, 1, 3])
    scalars = (layout.cu_seqlens, layout.max_seqlen, 0.25, 0, 1, 0, "gather")
    opcheck(torch.ops.torchspec.branch_attention, (q, k0, v0, kb, vb, [], *scalars))
    carriers = [torch.zeros_like(x).requires_grad_() for x in (k0, v0, *kb, *vb)]
    detached = [k0.detach(), v0.detach(), [x.detach() for x in kb], [x.detach() for x in vb]]
    opcheck(torch.ops.torchspec.branch_attention, (q, *detached, carriers, *scalars))


def unroll(x, passes: int, layout):
    """A toy K-pass unroll: a growing list of branches, gradients through every pass."""
    k0, v0 = x[:, :2].contiguous(), x[:, 2:4].contiguous()
    kb, vb, total, q = [], [], 0.0, x
    for index in range(passes):
        if index:
            kb.append(q[:, :2] * 0.5)
            vb.append(q[:, 2:4] * 0.3)
        q, _ = branch_attention(q, k0, v0, kb, vb, layout.cu_seqlens, layout.max_seqlen, 0.25)
        total = total + (layout.shift(q, index) * (index + 1)).sin().sum()
    return total


def test_compile_is_one_graph_and_bit_equal():
    compiled = torch.compile(unroll, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([7, 1, 9], [5, 3]):
        layout = PackedZigzag(lengths)
        x = torch.randn(sum(lengths), 6, 8, dtype=torch.float64, requires_grad=True)
        eager, fast = unroll(x, 4, layout), compiled(x, 4, layout)
        assert torch.equal(eager, fast)
        assert torch.equal(*(torch.autograd.grad(y, x)[0] for y in (eager, fast)))


def saved_bytes(passes: int) -> int:
    layout = PackedZigzag([40, 24])
    x = torch.randn(64, 6, 8, requires_grad=True)
    k0, v0 = x[:, :2].contiguous(), x[:, 2:4].contiguous()
    storages: dict[int, int] = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    kb, vb, q, keep = [], [], x, []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for index in range(passes):
            if index:
                kb.append((x[:, :2] + index).contiguous())
                vb.append((x[:, 2:4] + index).contiguous())
            q, _ = branch_attention(x + index, k0, v0, kb, vb, layout.cu_seqlens, layout.max_seqlen, 0.25)
            keep.append((q, x + index))
    return sum(storages.values())


def test_memory_is_linear_in_passes():
    sizes = [saved_bytes(k) for k in (2, 3, 4, 5)]
    increments = {b - a for a, b in zip(sizes, sizes[1:])}
    assert len(increments) == 1
    row = 64 * 8 * 4  # one head's rows in fp32
    # q and out of 6 heads, lse, and one new branch key and value of 2 heads
    assert increments == {12 * row + 64 * 6 * 4 + 4 * row}


def test_refusals():
    q, k0, v0, kb, vb, layout = make(3, 1)
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    with pytest.raises(ValueError, match="equal groups"):
        branch_attention(q[:, :5], k0, v0, kb, vb, cu, longest, 1.0)
    with pytest.raises(ValueError, match="one key per query row"):
        branch_attention(q, k0, v0, [kb[0][:-1]], vb, cu, longest, 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        branch_attention(q.float(), k0, v0, kb, vb, cu, longest, 1.0)
    with pytest.raises(ValueError, match="not for a tensor on meta"):
        kernel_for(q.to("meta"))
    with pytest.raises(ValueError, match="end at row"):
        branch_attention(q[:-1], k0[:-1], v0[:-1], [], [], cu, longest, 1.0)


def test_cuda_kernel_refuses_what_flash_cannot_run():
    layout = PackedZigzag([4])
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="bfloat16 and float16, not torch.float32"):
        cuda.trunk_forward(x, x, x, TrunkView(layout.cu_seqlens, 4), 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("branches", [0, 2])
def test_cuda_equals_oracle(branches):
    *inputs, layout = make(4, branches, dtype=torch.bfloat16)

    def to(x):
        return [to(y) for y in x] if isinstance(x, list) else x.detach().cuda().requires_grad_()

    moved, cu = [to(x) for x in inputs], layout.cu_seqlens.cuda()
    out, _ = branch_attention(*moved, cu, layout.max_seqlen, 1 / math.sqrt(DIM))
    want, _ = run(
        dense_branch_attention,
        *[[y.double() for y in x] if isinstance(x, list) else x.double() for x in inputs],
        layout,
    )
    assert relative(out.cpu(), want) < 8e-3
    flat = lambda x: [*x[:3], *x[3], *x[4]]  # noqa: E731
    weight = torch.randn_like(want)
    got = torch.autograd.grad((out * weight.to(out)).sum(), flat(moved))
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), flat(inputs))):
        assert relative(a.cpu(), b) < 1e-2
