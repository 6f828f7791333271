"""The K-pass unroll against a dense oracle: by hand on six tokens, and on random packs.

The six tokens are two documents, rows 0-1 and rows 2-5, K = 3. Keys: rows of pass 0 | of pass 1 | of pass 2.

    pass 0            pass 1                          pass 2
    1 . . . . .       1 . . . . .   1 . . . . .       1 . . . . .   1 . . . . .   1 . . . . .
    1 1 . . . .       1 1 . . . .   . 1 . . . .       1 1 . . . .   . 1 . . . .   . 1 . . . .
    . . 1 . . .       . . 1 . . .   . . 1 . . .       . . 1 . . .   . . 1 . . .   . . 1 . . .
    . . 1 1 . .       . . 1 1 . .   . . . 1 . .       . . 1 1 . .   . . . 1 . .   . . . 1 . .
    . . 1 1 1 .       . . 1 1 1 .   . . . . 1 .       . . 1 1 1 .   . . . . 1 .   . . . . 1 .
    . . 1 1 1 1       . . 1 1 1 1   . . . . . 1       . . 1 1 1 1   . . . . . 1   . . . . . 1
"""

from __future__ import annotations

import pytest
import torch
from draft_oracle import dense_unroll, gather_rows, policy_shape, random_draft, unroll_rows

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.draft.config import DraftConfig
from torchspec.draft.eagle3 import Eagle3Draft

TRUNK = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0],
    [0, 0, 1, 1, 0, 0],
    [0, 0, 1, 1, 1, 0],
    [0, 0, 1, 1, 1, 1],
]
OWN_ROW = [
    [1, 0, 0, 0, 0, 0],
    [0, 1, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [0, 0, 0, 0, 1, 0],
    [0, 0, 0, 0, 0, 1],
]
TOKENS = [7, 3, 9, 4, 5, 8]
INPUT_TOKENS = [  # x[t+1+k], - where the document has ended
    [3, None, 4, 5, 8, None],
    [None, None, 5, 8, None, None],
    [None, None, 8, None, None, None],
]
ROPE_POSITIONS = [
    [0, 1, 0, 1, 2, 3],
    [1, 2, 1, 2, 3, 4],
    [2, 3, 2, 3, 4, 5],
]


def inputs(draft: Eagle3Draft, tokens: int, seed: int):
    """Random taps and embedding rows that record gradients."""
    generator = torch.Generator().manual_seed(seed)
    dtype = draft.compute_dtype

    def rows():
        return torch.randn(tokens, draft.shape.hidden_size, generator=generator, dtype=dtype).requires_grad_()

    return [rows() for _ in draft.tap_ids], rows()


def run_oracle(draft, taps, embeds, positions, masks):
    shape = draft.shape
    return dense_unroll(
        dict(draft.named_parameters()),
        torch.cat(taps, dim=-1),
        embeds,
        positions,
        masks,
        head_dim=shape.head_dim,
        theta=shape.rope_theta,
        eps=shape.norm_eps,
        norm_before_residual=shape.norm_before_residual,
    )


def gradients(outputs, weights, leaves):
    """Gradients of a random projection of all passes."""
    total = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, leaves)


def assert_same(actual, expected, tolerance=1e-12, note=""):
    for one, other in zip(actual, expected, strict=True):
        scale = other.abs().max().clamp_min(1.0)
        assert (one - other).abs().max() <= tolerance * scale, note


@pytest.mark.parity
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_six_tokens_by_hand(norm_before_residual):
    draft = random_draft(3, ttt_steps=3, norm_before_residual=norm_before_residual)
    table_VE = torch.randn(11, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    taps, _ = inputs(draft, 6, seed=4)
    zero = torch.zeros(12, dtype=torch.float64)
    embeds = [torch.stack([zero if x is None else table_VE[x] for x in row]) for row in INPUT_TOKENS]
    trunk, own = torch.tensor(TRUNK), torch.tensor(OWN_ROW)
    masks = [trunk, torch.cat((trunk, own), dim=1), torch.cat((trunk, own, own), dim=1)]
    expected = run_oracle(draft, taps, embeds, [torch.tensor(row) for row in ROPE_POSITIONS], masks)

    actual = draft(taps, table_VE[torch.tensor(TOKENS)], PackedZigzag([2, 4]))

    assert len(actual) == 3
    assert_same(actual, expected)
    weights = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    leaves = [*taps, table_VE, *(p for name, p in draft.named_parameters() if name != "lm_head.weight")]
    assert_same(gradients(actual, weights, leaves), gradients(expected, weights, leaves))


@pytest.mark.parity
@pytest.mark.parametrize("passes", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (2, 2)])
def test_random_packs(passes, heads):
    seed = int(torch.randint(0, 2**31, ()))
    shape = policy_shape(num_heads=heads[0], num_kv_heads=heads[1])
    draft = random_draft(seed, shape=shape, ttt_steps=passes, tap_ids=(0, 2, 3, 6))
    lengths = [3, 1, 5, 2]
    taps, embed = inputs(draft, sum(lengths), seed)
    sources, positions, masks = unroll_rows(lengths, passes)
    expected = run_oracle(draft, taps, [gather_rows(embed, source) for source in sources], positions, masks)
    actual = draft(taps, embed, PackedZigzag(lengths))
    weights = torch.randn(passes, sum(lengths), 12, dtype=torch.float64)
    leaves = [*taps, *(p for name, p in draft.named_parameters() if name != "lm_head.weight")]
    assert_same(actual, expected, note=f"seed {seed}")
    assert_same(gradients(actual, weights, leaves), gradients(expected, weights, leaves), note=f"seed {seed}")


@pytest.mark.parity
def test_packed_equals_one_document_at_a_time():
    draft = random_draft(8, ttt_steps=3)
    lengths = [4, 1, 6]
    taps, embed = inputs(draft, 11, seed=9)
    packed = draft(taps, embed, PackedZigzag(lengths))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = draft([tap[rows] for tap in taps], embed[rows], PackedZigzag([length]))
        assert_same([out[rows] for out in packed], alone)
        start += length


def test_every_pass_is_rotated_further(monkeypatch):
    """Without the +k every pass would see its own branch key at distance 0 from the trunk's newest key."""
    from torchspec.draft.eagle3 import model

    draft = random_draft(10, ttt_steps=3)
    taps, embed = inputs(draft, 5, seed=11)
    layout = PackedZigzag([5])
    right = draft(taps, embed, layout)
    tables = model.rope_tables
    monkeypatch.setattr(
        model, "rope_tables", lambda positions, *args, **kwargs: tables(layout.positions_T, *args, **kwargs)
    )
    wrong = draft(taps, embed, layout)
    assert torch.equal(right[0], wrong[0])
    assert (right[1] - wrong[1]).abs().max() > 1e-3
    assert (right[2] - wrong[2]).abs().max() > 1e-3


def test_passes_feed_back_with_gradient():
    """The last pass alone reaches fc, through the hidden states that earlier passes fed back."""
    draft = random_draft(12, ttt_steps=3)
    taps, embed = inputs(draft, 4, seed=13)
    (gradient,) = torch.autograd.grad(draft(taps, embed, PackedZigzag([4]))[2].square().sum(), draft.fc.weight)
    assert gradient.abs().max() > 1e-6


def test_compiles_without_graph_break():
    draft = random_draft(14, ttt_steps=3)
    taps, embed = inputs(draft, 7, seed=15)
    layout = PackedZigzag([3, 4])
    eager = draft(taps, embed, layout)
    torch._dynamo.reset()
    compiled = torch.compile(draft, fullgraph=True, backend="aot_eager")(taps, embed, layout)
    weights = torch.randn(3, 7, 12, dtype=torch.float64)
    leaves = [p for name, p in draft.named_parameters() if name != "lm_head.weight"]
    assert_same(compiled, eager)
    assert_same(gradients(compiled, weights, leaves), gradients(eager, weights, leaves))


def test_compute_dtype_is_cast_at_use():
    """bf16 compute on fp32 masters: bf16 hidden states near the fp32 ones, fp32 gradients on the masters."""
    draft = random_draft(16, dtype=torch.float32, ttt_steps=2)
    taps, embed = inputs(draft, 6, seed=17)
    layout = PackedZigzag([6])
    exact = draft(taps, embed, layout)
    assert all(out.dtype == torch.float32 for out in exact)
    draft.compute_dtype = torch.bfloat16
    rounded = draft(taps, embed, layout)
    assert all(out.dtype == torch.bfloat16 for out in rounded)
    assert all((a - b).abs().max() < 0.1 for a, b in zip(exact, rounded, strict=True))
    rounded[1].float().sum().backward()
    assert draft.midlayer.self_attn.q_proj.weight.grad.dtype == torch.float32


def test_build_uses_its_own_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = Eagle3Draft.build(DraftConfig(), policy_shape(), seed=5)
    other = Eagle3Draft.build(DraftConfig(), policy_shape(), seed=5)
    third = Eagle3Draft.build(DraftConfig(), policy_shape(), seed=6)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, third.fc.weight)


def test_wrong_number_of_taps_is_refused():
    draft = random_draft(18, ttt_steps=1)
    taps, embed = inputs(draft, 3, seed=19)
    with pytest.raises(ValueError, match="reads 3 taps .* given 2"):
        draft(taps[:2], embed, PackedZigzag([3]))
