"""What each rank computes: pairs that attend, against the drawn mask, and their balance over ranks."""

from __future__ import annotations

import pytest
import torch

from torchspec.attention.cpu import tiles_of
from torchspec.attention.oracle import dense_mask
from torchspec.attention.view import FULL, TrunkView, visible_pairs
from torchspec.context_parallel.layout import PackedZigzag


def pairs_of(lengths, size, window=0, k_rank=FULL):
    """Visible pairs of every rank."""
    found = []
    for rank in range(size):
        layout = PackedZigzag(lengths, cp_size=size, cp_rank=rank)
        view = TrunkView(layout.cu_seqlens, layout.max_seqlen, window, size, rank, k_rank)
        rows = layout.num_tokens
        found.append(visible_pairs(view, rows, layout.num_tokens_global if k_rank == FULL else rows))
    return found


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pairs_are_those_of_the_mask(size, window):
    lengths = [16, 8, 24]  # no padding at any of the sizes
    total = int(dense_mask(torch.tensor([0, 16, 24, 48]), 0, window).sum())
    assert sum(pairs_of(lengths, size, window)) == total
    assert sum(sum(pairs_of(lengths, size, window, k_rank=k)) for k in range(size)) == total


@pytest.mark.parametrize("size", [2, 4, 8])
def test_full_causal_layers_are_balanced_exactly(size):
    """max / mean == 1.000 for every packing, in gather and in every step of the ring but its first."""
    for seed in range(8):
        lengths = torch.randint(1, 200, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert len(set(pairs_of(lengths, size))) == 1
        for step in range(1, size):
            work = []
            for rank in range(size):
                layout = PackedZigzag(lengths, cp_size=size, cp_rank=rank)
                view = TrunkView(layout.cu_seqlens, layout.max_seqlen, 0, size, rank, (rank - step) % size)
                work.append(visible_pairs(view, layout.num_tokens, layout.num_tokens))
            assert len(set(work)) == 1


def test_sliding_windows_are_not_balanced():
    """The figures of a window of half the document: 7/6 at C = 2, 1.25 at C = 4 in the limit."""
    for size, limit in ((2, 1.166), (4, 1.25)):
        work = pairs_of([4096], size, window=2048)
        assert max(work) / (sum(work) / size) == pytest.approx(limit, abs=2e-3)


@pytest.mark.parametrize("window", [0, 5])
def test_tiles_cover_every_pair_once(window):
    """The CPU kernel's tiles, painted into a matrix, are exactly the mask."""
    lengths, size = [16, 8, 24], 2
    mask = dense_mask(torch.tensor([0, 16, 24, 48]), 0, window).int()
    for rank in range(size):
        layout = PackedZigzag(lengths, cp_size=size, cp_rank=rank)
        view = TrunkView(layout.cu_seqlens, layout.max_seqlen, window, size, rank)
        painted = torch.zeros(layout.num_tokens, 48, dtype=torch.int32)
        for tile in tiles_of(view, layout.num_tokens, 48):
            block = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0, dtype=torch.int32)
            block = block.tril() if tile.causal else block
            painted[tile.q0 : tile.q1, tile.k0 : tile.k1] += block if tile.visible is None else tile.visible.int()
        rows = torch.tensor([0, 16, 24])[layout.doc_ids_T] + layout.positions_T
        assert torch.equal(painted, mask[rows])


def test_a_document_that_cannot_be_cut_is_refused():
    view = TrunkView(torch.tensor([0, 8, 14], dtype=torch.int32), 8, cp_size=2)
    with pytest.raises(ValueError, match="A document of 6 rows cannot be cut into 4 equal chunks"):
        visible_pairs(view, 7, 14)
