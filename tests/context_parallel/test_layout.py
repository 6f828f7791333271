"""PackedZigzag: the arithmetic of who holds which token, and shift on one rank."""

from __future__ import annotations

import pytest
import torch

from torchspec.context_parallel.layout import PackedZigzag


def test_layout_as_drawn():
    """The picture in the module: documents of 7 and 3 tokens, C = 2."""
    ranks = [PackedZigzag([7, 3], cp_size=2, cp_rank=r) for r in (0, 1)]
    assert ranks[0].padded_lengths == (8, 4)
    assert ranks[0].positions_T.tolist() == [0, 1, 6, 7, 0, 3]
    assert ranks[1].positions_T.tolist() == [2, 3, 4, 5, 1, 2]
    assert ranks[0].doc_ids_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert ranks[0].real_T.tolist() == [True, True, True, False, True, False]
    assert ranks[0].cu_seqlens.tolist() == [0, 8, 12] and ranks[0].cu_seqlens.dtype == torch.int32
    assert ranks[0].num_tokens == 6 and ranks[0].max_seqlen == 8


def test_one_rank_is_the_plain_pack():
    layout = PackedZigzag([3, 1, 2])
    assert layout.padded_lengths == (3, 1, 2) and layout.num_tokens == 6
    assert layout.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.doc_ids_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert layout.doc_end_T.tolist() == [3, 3, 3, 1, 2, 2]
    assert bool(layout.real_T.all())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_shard_unshard_round_trip(size):
    lengths = [13, 1, 22, 64]
    ranks = [PackedZigzag(lengths, cp_size=size, cp_rank=r) for r in range(size)]
    x = torch.randn(sum(lengths), 3)
    shards = [layout.shard(x) for layout in ranks]
    assert {len(s) for s in shards} == {ranks[0].num_tokens}
    assert torch.equal(ranks[0].unshard(shards), x)
    for layout, shard in zip(ranks, shards):
        assert not shard[~layout.real_T].any()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_equal_on_every_rank(size):
    """Keys seen per query, counted over padded rows, sum to the same number on every rank."""
    for seed in range(5):
        lengths = torch.randint(1, 90, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        work = {int((PackedZigzag(lengths, cp_size=size, cp_rank=r).positions_T + 1).sum()) for r in range(size)}
        assert len(work) == 1


def test_shift_by_hand():
    layout = PackedZigzag([3, 1, 2])
    ids = torch.tensor([10, 11, 12, 20, 30, 31])
    assert layout.shift(ids, 0).tolist() == [10, 11, 12, 20, 30, 31]
    assert layout.shift(ids, 1).tolist() == [11, 12, 0, 0, 31, 0]
    assert layout.shift(ids, 2).tolist() == [12, 0, 0, 0, 0, 0]
    assert layout.shift(ids, 9).tolist() == [0] * 6
    assert layout.shift(ids > 11, 1).tolist() == [False, True, False, False, True, False]


def test_shift_gradient():
    layout = PackedZigzag([4, 1, 3])
    x = torch.randn(8, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layout.shift(x, 2), (x,))
    compiled = torch.compile(lambda x, layout: layout.shift(x, 1), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, layout), layout.shift(x, 1))


def test_refusals():
    with pytest.raises(ValueError, match="at least one token"):
        PackedZigzag([3, 0])
    with pytest.raises(ValueError, match="at least one token"):
        PackedZigzag([])
    with pytest.raises(ValueError, match="does not exist"):
        PackedZigzag([3], cp_size=2, cp_rank=2)
    layout = PackedZigzag([3])
    with pytest.raises(ValueError, match="3 rows"):
        layout.shift(torch.zeros(4), 1)
    with pytest.raises(ValueError, match="later positions"):
        layout.shift(torch.zeros(3), -1)
    with pytest.raises(ValueError, match="real tokens"):
        layout.shard(torch.zeros(4))
