"""Trunk and packed_attention on one rank: the plain op, fp32 sums of gradients, one graph, refusals."""

from __future__ import annotations

import pytest
import torch

from torchspec.attention import branch_attention
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.transport import choose_transport, gathered_rows
from torchspec.context_parallel.trunk import Trunk, packed_attention

LENGTHS, PASSES = [13, 1, 22], 7


def leaves(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(36, h, 8, generator=generator).to(dtype).requires_grad_() for h in (6, 2, 2)]
        for _ in range(PASSES)
    ]


def test_equals_the_plain_op():
    layout, passes = PackedZigzag(LENGTHS), leaves(torch.float64)
    trunk = Trunk(layout, scale=0.3, window=5)
    for index, (q, k, v) in enumerate(passes):
        keys, values = [p[1] for p in passes[: index + 1]], [p[2] for p in passes[: index + 1]]
        want, _ = branch_attention(
            q, keys[0], values[0], keys[1:], values[1:], layout.cu_seqlens, layout.max_seqlen, 0.3, 5
        )
        assert torch.equal(trunk.attend(q, k, v), want)
    q, k, v = passes[0]
    want, _ = branch_attention(q, k, v, [], [], layout.cu_seqlens, layout.max_seqlen, 8**-0.5)
    assert torch.equal(packed_attention(q, k, v, layout), want)


def test_gradients_over_passes_are_summed_unrounded():
    """bf16: what reaches each key and value is the fp32 sum over the passes, rounded once."""
    layout, passes = PackedZigzag(LENGTHS), leaves(torch.bfloat16)
    trunk, loss = Trunk(layout), 0.0
    for q, k, v in passes:
        loss = loss + trunk.attend(q, k, v).float().sum()
    loss.backward()
    expected = [[torch.zeros(36, 2, 8), torch.zeros(36, 2, 8)] for _ in passes]
    for index, (q, _, _) in enumerate(passes):
        (k0, v0), rest = passes[0][1:], passes[1 : index + 1]
        kb, vb = [p[1] for p in rest], [p[2] for p in rest]
        tail = (layout.cu_seqlens, layout.max_seqlen, 8**-0.5, 0, 1, 0, "")
        with torch.no_grad():
            out, lse = torch.ops.torchspec.branch_attention(q, k0, v0, kb, vb, [], *tail)
            _, dk0, dv0, dkb, dvb = torch.ops.torchspec.branch_attention_backward(
                torch.ones_like(out), None, q, k0, v0, kb, vb, out, lse, True, *tail
            )
        for total, dk, dv in zip(expected, [dk0, *dkb], [dv0, *dvb]):
            total[0] += dk
            total[1] += dv
    for (_, k, v), (dk, dv) in zip(passes, expected):
        # sums of fp32 in another order may differ in the last bit before rounding: one bf16 ulp at most
        torch.testing.assert_close(k.grad.float(), dk, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(v.grad.float(), dv, rtol=2**-8, atol=1e-6)
    exact = torch.cat([(k.grad == dk.bfloat16()).flatten() for (_, k, _), (dk, _) in zip(passes, expected)])
    assert exact.float().mean() > 0.99  # summing in bf16 leaves about half of them wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph(dtype):
    layout = PackedZigzag(LENGTHS)

    def step(x):
        trunk, q, total = Trunk(layout), x, 0.0
        for index in range(3):
            q = trunk.attend(q, q[:, :2] * 0.5, q[:, 2:4])
            total = total + layout.shift(q, index).float().sin().sum()
        return total

    x = torch.randn(36, 6, 8, dtype=dtype, requires_grad=True)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = function(x)
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_gathered_rows_are_those_of_the_layout(size):
    """Device arithmetic and the layout agree on where each row of the pack lies after a gather."""
    ranks = [PackedZigzag(LENGTHS, cp_size=size, cp_rank=r) for r in range(size)]
    starts = ranks[0].cu_seqlens.long()
    held = torch.cat([starts[x.doc_ids_T] + x.positions_T for x in ranks])
    rows = ranks[0].num_tokens_global
    if size == 1:
        assert torch.equal(held, torch.arange(rows))
        return
    assert torch.equal(held[gathered_rows(ranks[0].cu_seqlens, rows, size)], torch.arange(rows))


def test_auto_gathers_what_fits():
    numbers = dict(rows=1024, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    needed = 1024 * 2 * 8 * 128 * (2 + 2 * 4)
    assert choose_transport("auto", budget_bytes=needed, **numbers) == "gather"
    assert choose_transport("auto", budget_bytes=needed - 1, **numbers) == "ring"
    assert choose_transport("ring", budget_bytes=needed, **numbers) == "ring"
    with pytest.raises(ValueError, match="choose gather, ring or auto"):
        choose_transport("pigeon", budget_bytes=0, **numbers)


def test_refusals():
    layout = PackedZigzag(LENGTHS)
    x = torch.zeros(35, 2, 8)
    with pytest.raises(ValueError, match="36 rows"):
        packed_attention(x, x, x, layout)
    with pytest.raises(ValueError, match="36 rows"):
        Trunk(layout).attend(x, x, x)
    with pytest.raises(ValueError, match="knows gather and ring"):
        PackedZigzag(LENGTHS, trunk_transport="auto")
    two = PackedZigzag(LENGTHS, cp_size=2, cp_rank=0)
    x = torch.zeros(two.num_tokens, 2, 8)
    with pytest.raises(ValueError, match="needs a layout with a cp_mesh"):
        Trunk(two).attend(x, x, x)
    with pytest.raises(ValueError, match="only when the layout has a cp_mesh"):
        two.shift(x, 1)
