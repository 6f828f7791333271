"""Two gloo ranks, the draft as one FSDP2 root, each with its own pack: gradients and export as on one rank."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draft_oracle import random_draft

from torchspec.context_parallel.layout import PackedZigzag

LENGTHS = [[5, 1, 4], [2, 6, 2]]  # of rank 0 and rank 1
BACKENDS = ("off", "aot_eager")  # of torch.compile inside the root
CONFIG = {"ttt_steps": 3, "vocab_size": 6}


def batch(draft, rank):
    """One rank's pack: policy rows, head, taps, embedding rows, tokens, mask, layout."""
    generator = torch.Generator().manual_seed(rank)

    def rows(count=10):
        return torch.randn(count, 12, generator=generator, dtype=torch.float64)

    tokens_T = torch.randint(0, 11, (10,), generator=generator)
    mask_T = torch.randint(0, 2, (10,), generator=generator)
    head_VE = torch.randn(11, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return (
        rows(),
        head_VE,
        [rows() for _ in draft.tap_ids],
        rows(),
        tokens_T,
        mask_T,
        PackedZigzag(LENGTHS[rank]),
    )


def loss_of(draft, rank, counts_K):
    """This rank's share of the loss."""
    hidden_TE, head_VE, taps, embed_TE, tokens_T, mask_T, layout = batch(draft, rank)
    targets = draft.targets(hidden_TE, head_VE, tokens_T, mask_T, layout)
    return draft.loss(draft(taps, embed_TE, layout), targets, head_VE, counts_K).loss


def counts_of(draft, ranks):
    return sum(draft.count_rows(PackedZigzag(LENGTHS[rank]), batch(draft, rank)[5]) for rank in ranks)


def run(rank, folder):
    """One rank; rank 0 leaves full gradients (plain and compiled) and exported tensors in folder."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for backend in BACKENDS:
        draft = random_draft(31, **CONFIG)
        if backend != "off":
            draft.forward = torch.compile(draft.forward, fullgraph=True, backend=backend)
        fully_shard(draft)
        counts_K = counts_of(draft, [rank])
        dist.all_reduce(counts_K)
        loss_of(draft, rank, counts_K).backward()
        # FSDP averages over ranks, the loss is already divided by global counts
        found[backend] = {name: 2 * p.grad.full_tensor() for name, p in draft.named_parameters()}
    found["exported"] = dict(draft.hf_weights())
    if rank == 0:
        torch.save(found, os.path.join(folder, "rank0.pt"))
    dist.destroy_process_group()


@pytest.mark.parity
def test_fsdp_root_equals_one_rank():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=2)
        found = torch.load(os.path.join(folder, "rank0.pt"))
    draft = random_draft(31, **CONFIG)
    counts_K = counts_of(draft, [0, 1])
    sum(loss_of(draft, rank, counts_K) for rank in (0, 1)).backward()
    for backend in BACKENDS:
        for name, parameter in draft.named_parameters():
            error = (found[backend][name] - parameter.grad).abs().max()
            assert error <= 1e-12 * parameter.grad.abs().max().clamp_min(1.0), f"{backend}: {name}"
    assert list(found["exported"]) == [name for name, _ in draft.hf_weights()]
    assert all(torch.equal(found["exported"][name], tensor) for name, tensor in draft.hf_weights())
