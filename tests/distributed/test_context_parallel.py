"""Context parallelism on gloo ranks equals one rank: the fp64 oracle, shift, wire, memory, compile.

What the ranks of C = 2 see of a document of 8 rows in the trunk (rows: queries in the rank's order, columns:
keys in document order), which is what the masks of the two chunks come to::

    rank 0   0  1 0 0 0 0 0 0 0        rank 1   2  1 1 1 0 0 0 0 0
             1  1 1 0 0 0 0 0 0                 3  1 1 1 1 0 0 0 0
             6  1 1 1 1 1 1 1 0                 4  1 1 1 1 1 0 0 0
             7  1 1 1 1 1 1 1 1                 5  1 1 1 1 1 1 0 0
"""

from __future__ import annotations

import cp_ranks
import pytest
import torch
from cp_ranks import BF16_LENGTHS, CASES, DIM, GROUPS, LENGTHS, PASSES, SHIFTS

from torchspec.attention.oracle import DenseTrunk, dense_branch_attention
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.trunk import Trunk

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]
SEED = int(torch.empty((), dtype=torch.int64).random_(2**31))


@pytest.fixture(scope="module", params=[1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def ranks(request):
    """The results of every rank, computed once per C."""
    return cp_ranks.run_ranks(request.param, cp_ranks.everything, SEED)


def whole(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The real pack from the ranks' rows."""
    return PackedZigzag(LENGTHS, cp_size=len(tensors)).unshard(tensors)


def oracle(kind: str, ratio: int, window: int):
    layout = PackedZigzag(LENGTHS)
    passes = cp_ranks.leaves(ratio)
    if kind == "draft":
        return cp_ranks.unroll(DenseTrunk(layout, window), passes)
    q, k, v, weight = passes[0]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = dense_branch_attention(*inputs, [], [], layout.cu_seqlens, layout.max_seqlen, DIM**-0.5, window)[0]
    return [out.detach()], list(torch.autograd.grad((out * weight).sum(), inputs))


@pytest.mark.parametrize("kind", ["draft", "policy"])
@pytest.mark.parametrize("ratio,window,transport,dtype", CASES)
def test_equals_oracle(ranks, kind, ratio, window, transport, dtype):
    found = [r["exactness"][(kind, ratio, window, transport, dtype)] for r in ranks]
    expected = oracle(kind, ratio, window)
    for part in (0, 1):  # outputs, gradients
        for index, want in enumerate(expected[part]):
            got = whole([f[part][index] for f in found])
            assert got.dtype == dtype
            if dtype == torch.float64:
                assert (got - want).abs().max() < 1e-12
            else:
                assert (got.double() - want).norm() / want.norm() < 2e-6


@pytest.mark.parametrize("n", SHIFTS)
def test_shift(ranks, n):
    layout = PackedZigzag(LENGTHS)
    ids, rows, weight = cp_ranks.shift_inputs()
    rows.requires_grad_()
    shifted = layout.shift(rows, n)
    expected = {
        "ids": layout.shift(ids, n),
        "mask": layout.shift(ids % 2 == 0, n),
        "bf16": layout.shift(rows.detach().bfloat16(), n),
        "rows": shifted.detach(),
        "grad": torch.autograd.grad((shifted * weight).sum(), rows)[0],
    }
    for name, want in expected.items():
        assert torch.equal(whole([r["shifting"][n][name] for r in ranks]), want), name


def test_wire(ranks):
    """gather: 3(C-1) units in bf16 whatever K, 4(C-1) for a policy layer; ring: the paper's K(2(C-1) +
    2C).
    """
    size = len(ranks)
    for r in ranks:
        for (transport, dtype, k), (units, calls) in r["wire"].items():
            widening = 2 if dtype == torch.bfloat16 else 1
            passes = 1 if k == "policy" else k
            if size == 1:
                assert units == 0 and not calls
            elif transport == "ring":
                assert units == passes * (2 * (size - 1) + widening * size)
            elif k == "policy":
                assert units == (2 + widening) * (size - 1)
                assert sorted(calls) == ["all_gather_into_tensor"] * 2 + ["reduce_scatter_tensor"]
            else:
                assert units == (1 + widening) * (size - 1)
                assert calls == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_saved_bytes(ranks):
    """Linear in K; nothing per token of the whole pack is kept but the one gathered K0 | V0."""
    for r in ranks:
        for transport, (sizes, storages, rows, rows_global) in r["saved"].items():
            increments = {b - a for a, b in zip(sizes, sizes[1:])}
            q_or_out, key_or_value, lse = (
                rows * 3 * GROUPS * DIM * 4,
                rows * GROUPS * DIM * 4,
                rows * 3 * GROUPS * 4,
            )
            assert increments == {2 * q_or_out + lse + 2 * key_or_value}
            if len(ranks) == 1:
                continue
            gathered = rows_global * 2 * GROUPS * DIM * 4
            large = [s for s in storages if s > q_or_out]
            assert large == ([gathered] if transport == "gather" else [])


def test_compile(ranks):
    """One fullgraph aot_eager graph per transport, bit-equal to eager; run at C = 4, as tracing is slow."""
    for r in ranks:
        assert r.get("compiled", {"gather": True, "ring": True}) == {"gather": True, "ring": True}
        assert ("compiled" in r) == (len(ranks) == 4)


def test_far_away_gradient_crosses_ranks(ranks):
    """The third document's last token reaches all 22 rows of its document, and no other document."""
    for transport in ("gather", "ring"):
        seen = whole([r["far_away"][transport] for r in ranks])
        assert seen.tolist() == [False] * 14 + [True] * 22


@pytest.mark.parametrize("transport", ["gather", "ring"])
@pytest.mark.parametrize("kind", ["draft", "policy"])
def test_bf16_error_against_single_rank_flash(ranks, kind, transport):
    """Each output and gradient: no worse than 1.1 times the error, against fp64, of one rank in bf16, which is the
    better of PyTorch's flash kernel and ours (whose pieces stay in fp32 until the merge)."""
    layout = PackedZigzag(BF16_LENGTHS)
    inputs = [[x.bfloat16() for x in p] for p in cp_ranks.leaves(3, seed=SEED, lengths=BF16_LENGTHS)]

    def run(trunk, dtype):
        passes = [[x.to(dtype) for x in p] for p in inputs[: 1 if kind == "policy" else PASSES]]
        outs, grads = cp_ranks.unroll(trunk(layout), passes)
        return [x.double() for x in (*outs, *grads)]

    want = run(DenseTrunk, torch.float64)
    alone = [run(trunk, torch.bfloat16) for trunk in (FlashTrunk, Trunk)]
    found = [[*r["bf16"][(kind, transport)][0], *r["bf16"][(kind, transport)][1]] for r in ranks]
    for index, exact in enumerate(want):
        got = PackedZigzag(BF16_LENGTHS, cp_size=len(ranks)).unshard([f[index] for f in found]).double()
        theirs = min(float((x[index] - exact).norm()) for x in alone)
        ratio = float((got - exact).norm()) / theirs
        assert ratio < 1.1, f"tensor {index}, seed {SEED}: {ratio:.3f} times the error of one rank"


class FlashTrunk:
    """One rank's flash kernel in bf16, one document at a time; branches by a dense merge in bf16."""

    def __init__(self, layout: PackedZigzag):
        self.layout, self.keys, self.values = layout, [], []

    def attend(self, q, k, v):
        self.keys.append(k)
        self.values.append(v)
        scale, cu = q.shape[-1] ** -0.5, self.layout.cu_seqlens.tolist()
        outs = []
        for a, b in zip(cu, cu[1:]):
            heads = [x[a:b].transpose(0, 1).unsqueeze(0) for x in (q, self.keys[0], self.values[0])]
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
            outs.append((o[0].transpose(0, 1), lse[0].transpose(0, 1)))
        out, lse = torch.cat([o for o, _ in outs]), torch.cat([s for _, s in outs])
        repeat = q.shape[1] // k.shape[1]
        for key, value in zip(self.keys[1:], self.values[1:]):
            score = (q * key.repeat_interleave(repeat, 1)).sum(-1).float() * scale
            joint = torch.logaddexp(lse, score)
            out = (
                torch.exp(lse - joint).unsqueeze(-1) * out
                + torch.exp(score - joint).unsqueeze(-1) * value.repeat_interleave(repeat, 1)
            ).to(q.dtype)
            lse = joint
        return out
