"""Bins that fit and balance; tensors whose rows stand where the legend of data/packing.py says."""

from __future__ import annotations

import random

import pytest
import torch

from torchspec.data.packing import Sequence, build_batch, pack
from torchspec.errors import ConfigError, RunError


def cost(n, hidden=1024):
    return n + n * n / (12 * hidden)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_every_sequence_is_packed_once_and_nothing_overflows(num_ranks, pad_multiple):
    rng = random.Random()
    for _ in range(50):
        lengths = [rng.randint(1, 500) for _ in range(rng.randint(1, 80))]
        limit = rng.randint(504, 2000)
        bins = pack(lengths, limit, num_ranks=num_ranks, pad_multiple=pad_multiple)
        assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
        assert len(bins) % num_ranks == 0
        rows = [sum(-(-lengths[i] // pad_multiple) * pad_multiple for i in b) for b in bins]
        assert max(rows) <= limit
        assert bins == pack(lengths, limit, num_ranks=num_ranks, pad_multiple=pad_multiple)
        assert all(b == sorted(b) for b in bins)


def test_costs_are_balanced_with_attention_counted():
    rng = random.Random(0)
    lengths = [rng.choice([30, 60, 4000]) for _ in range(64)]
    costs = [sum(cost(lengths[i], 64) for i in b) for b in pack(lengths, 8192, hidden_size=64)]
    assert costs == sorted(costs, reverse=True)
    assert max(costs) / (sum(costs) / len(costs)) < 1.1
    # By tokens 1000 + 10 x 100 and 20 x 100 balance; by cost the long document outweighs all short ones.
    assert pack([1000] + [100] * 30, 4000, num_ranks=2, hidden_size=8) == [[0], list(range(1, 31))]


def test_no_more_bins_than_needed():
    assert [len(b) for b in pack([50] * 8, 100)] == [2, 2, 2, 2]
    assert pack([100, 60, 40, 100], 100) == pack([100, 60, 40, 100], 100)
    assert len(pack([100, 60, 40, 100], 100)) == 3
    assert pack([], 100) == []


def test_bins_of_one_moment_are_neighbours_in_cost():
    rng = random.Random(1)
    lengths = [rng.randint(10, 300) for _ in range(61)]
    bins = pack(lengths, 600, num_ranks=4)
    costs = [sum(cost(lengths[i]) for i in b) for b in bins]
    assert costs == sorted(costs, reverse=True)


def test_fewer_sequences_than_ranks_leave_empty_bins():
    bins = pack([5, 9], 100, num_ranks=4)
    assert sorted(map(tuple, bins)) == [(), (), (0,), (1,)]


def test_a_sequence_that_cannot_fit_is_refused():
    with pytest.raises(ConfigError, match="a sequence of 101 tokens does not fit train.tokens_per_microbatch = 100"):
        pack([5, 101], 100)
    with pytest.raises(ConfigError, match=r"97 tokens \(104 rows when padded to a multiple of 8\)"):
        pack([97], 100, pad_multiple=8)
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        pack([5, 0], 100)


def test_rows_stand_as_drawn():
    """Two documents, the first trained, the second not (the draft still learns from it); written out as
    literals."""
    batch = build_batch(
        [
            Sequence([11, 12], [13, 14, 15], [-0.5, -0.25, -1.0], advantage=2.0),
            Sequence([21], [22, 23], [-0.125, -4.0], advantage=3.0, trained=False),
            Sequence([31, 32], []),
        ]
    )
    #                                    p   p   r   r   e | p   r   e | p   p
    assert batch.tokens_T.tolist() == [11, 12, 13, 14, 15, 21, 22, 23, 31, 32]
    assert batch.targets_T.tolist() == [12, 13, 14, 15, 0, 22, 23, 0, 32, 0]
    assert batch.response_T.int().tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert batch.mask_T.int().tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.advantage_T.tolist() == [0, 2, 2, 2, 0, 0, 0, 0, 0, 0]
    assert batch.engine_logp_T.tolist() == [0, -0.5, -0.25, -1, 0, -0.125, -4, 0, 0, 0]
    assert batch.seq_ids_T.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert (batch.num_sequences, batch.num_trained) == (3, 3)
    assert batch.layout.doc_lengths == (5, 3, 2)
    assert batch.tokens_T.dtype == batch.targets_T.dtype == torch.int64
    assert batch.mask_T.dtype == batch.response_T.dtype == torch.bool
    assert batch.advantage_T.dtype == batch.engine_logp_T.dtype == torch.float32


def random_sequence(rng):
    prompt, response = (
        rng.choices(range(1, 99), k=rng.randint(1, 9)),
        rng.choices(range(1, 99), k=rng.randint(0, 9)),
    )
    return Sequence(prompt, response, [rng.random() for _ in response], rng.random(), rng.random() < 0.7)


def test_rows_agree_with_the_layouts_own_shift():
    rng = random.Random()
    batch = build_batch([random_sequence(rng) for _ in range(7)])
    assert torch.equal(batch.targets_T, batch.layout.shift(batch.tokens_T, 1))
    predicts_response_T = batch.layout.shift(batch.response_T, 1)
    assert not (batch.mask_T & ~predicts_response_T).any()
    assert not batch.engine_logp_T[~predicts_response_T].any() and not batch.advantage_T[~batch.mask_T].any()


@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_ranks_together_hold_the_same_rows(cp_size):
    rng = random.Random()
    sequences = [random_sequence(rng) for _ in range(5)]
    whole = build_batch(sequences)
    parts = [build_batch(sequences, cp_size=cp_size, cp_rank=r) for r in range(cp_size)]
    for name in (
        "tokens_T",
        "targets_T",
        "mask_T",
        "response_T",
        "advantage_T",
        "engine_logp_T",
        "seq_ids_T",
    ):
        shards = [getattr(p, name) for p in parts]
        assert torch.equal(parts[0].layout.unshard(shards), getattr(whole, name)), name
        if name != "seq_ids_T":
            assert not any(x[~p.layout.real_T].any() for x, p in zip(shards, parts)), f"{name} is not 0 on padding"
    assert all(p.num_trained == whole.num_trained == sum(int(q.mask_T.sum()) for q in parts) for p in parts)


@pytest.mark.parametrize(
    "sequence, sentence",
    [
        (Sequence([], [1]), "sequence 1 has an empty prompt"),
        (Sequence([1], [2, 3], [-1.0]), "2 response tokens but 1 log-probabilities"),
    ],
)
def test_sequences_that_make_no_sense_are_refused(sequence, sentence):
    with pytest.raises(RunError, match=sentence):
        build_batch([Sequence([1], [2]), sequence])
    with pytest.raises(RunError, match="without sequences"):
        build_batch([])


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("sequences", [0, 3])
def test_padding_documents_fill_up_and_count_nowhere(cp_size, sequences):
    held = [Sequence([1 + i, 2], [3, 4, 5][: i + 1], [-0.5] * (i + 1), advantage=1.0) for i in range(sequences)]
    rows = 600 // (2 * cp_size) * 2 * cp_size
    for rank in range(cp_size):
        batch = build_batch(held, cp_size=cp_size, cp_rank=rank, fill_to=rows)
        plain = build_batch(held, cp_size=cp_size, cp_rank=rank) if held else None
        layout = batch.layout
        assert layout.num_tokens == rows // cp_size and layout.max_seqlen <= 256
        used = plain.layout.num_tokens if held else 0
        for name in ("tokens_T", "targets_T", "mask_T", "response_T", "advantage_T", "engine_logp_T"):
            values = getattr(batch, name)
            assert not values[used:].any()
            assert held == [] or torch.equal(values[:used], getattr(plain, name))
        assert not layout.real_T[used:].any() and batch.num_trained == (plain.num_trained if held else 0)
        assert held == [] or torch.equal(layout.real_T[:used], plain.layout.real_T)


def test_a_pipeline_gets_a_number_of_microbatches_that_it_takes():
    even = lambda count: max(4, count + count % 2)  # noqa: E731
    bins = pack([10, 9, 8], 30, num_ranks=2, round_up=even)
    assert len(bins) == 8 and sorted(i for bin_ in bins for i in bin_) == [0, 1, 2]
    # Five bins of one sequence each would do, so six are made.
    assert len(pack([20] * 5, 30, round_up=even)) == 6
