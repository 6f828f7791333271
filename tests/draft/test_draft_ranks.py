"""The draft on two gloo ranks equals the draft on one: as FSDP2 root, and under context parallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from draft_oracle import random_draft
from gloo_ranks import results_of
from torch.distributed.device_mesh import init_device_mesh

from torchspec.context_parallel.layout import PackedZigzag

LENGTHS = [[6, 1, 7], [2, 8, 4]]  # of rank 0 and rank 1
BACKENDS = ("off", "aot_eager")  # of torch.compile inside the root
CONFIG = {"ttt_steps": 3, "vocab_size": 6}


def batch(draft, seed, layout):
    """A pack's policy rows, head, taps, embedding rows, tokens and mask; this rank's rows of each."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(layout.doc_lengths)

    def rows():
        return layout.shard(torch.randn(total, 12, generator=generator, dtype=torch.float64))

    tokens_T = layout.shard(torch.randint(0, 11, (total,), generator=generator))
    mask_T = layout.shard(torch.randint(0, 2, (total,), generator=generator))
    head_VE = torch.randn(11, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return rows(), head_VE, [rows() for _ in draft.tap_ids], rows(), tokens_T, mask_T


def loss_of(draft, seed, layout, counts_K):
    """This rank's share of the loss of a pack."""
    hidden_TE, head_VE, taps, embed_TE, tokens_T, mask_T = batch(draft, seed, layout)
    targets = draft.targets(hidden_TE, head_VE, tokens_T, mask_T, layout)
    return draft.loss(draft(taps, embed_TE, layout), targets, head_VE, counts_K).loss


def counts_of(draft, seed, layout):
    return draft.count_rows(layout, batch(draft, seed, layout)[5])


def proposals(draft, seed, layout):
    """What the draft proposes on a pack, [T, 3]."""
    _, head_VE, taps, _, tokens_T, _ = batch(draft, seed, layout)
    return draft.propose(tokens_T, taps, head_VE, layout, 3)


def run_fsdp(rank, backend):
    """Full gradients and exported tensors of an FSDP root whose ranks hold a pack each."""
    from torch.distributed.fsdp import fully_shard

    draft, layout = random_draft(31, **CONFIG), PackedZigzag(LENGTHS[rank])
    if backend != "off":
        draft.forward = torch.compile(draft.forward, fullgraph=True, backend=backend)
    fully_shard(draft)
    counts_K = counts_of(draft, rank, layout)
    dist.all_reduce(counts_K)
    loss_of(draft, rank, layout, counts_K).backward()
    # FSDP averages over ranks, the loss is already divided by global counts
    gradients = {name: 2 * p.grad.full_tensor() for name, p in draft.named_parameters()}
    return gradients, dict(draft.hf_weights())


def run_cp(transport):
    """Summed gradients and this rank's proposals of one pack that is cut in two."""
    draft = random_draft(31, **CONFIG)
    layout = PackedZigzag(LENGTHS[0], cp_mesh=init_device_mesh("cpu", (2,)), trunk_transport=transport)
    counts_K = counts_of(draft, 0, layout)
    dist.all_reduce(counts_K)
    loss_of(draft, 0, layout, counts_K).backward()
    for parameter in draft.parameters():
        dist.all_reduce(parameter.grad)
    return {name: p.grad for name, p in draft.named_parameters()}, proposals(draft, 0, layout)


def run(rank):
    """What one rank found."""
    found = {backend: run_fsdp(rank, backend) for backend in BACKENDS}
    return found | {transport: run_cp(transport) for transport in ("gather", "ring")}


def assert_gradients(found, draft, note):
    for name, parameter in draft.named_parameters():
        error = (found[name] - parameter.grad).abs().max()
        assert error <= 1e-12 * parameter.grad.abs().max().clamp_min(1.0), f"{note}: {name}"


@pytest.mark.parity
def test_two_ranks_equal_one():
    found = results_of(run, 2)

    draft, layouts = random_draft(31, **CONFIG), [PackedZigzag(lengths) for lengths in LENGTHS]
    counts_K = sum(counts_of(draft, rank, layouts[rank]) for rank in (0, 1))
    sum(loss_of(draft, rank, layouts[rank], counts_K) for rank in (0, 1)).backward()
    for backend in BACKENDS:
        gradients, exported = found[0][backend]
        assert_gradients(gradients, draft, f"FSDP, torch.compile {backend}")
        assert list(exported) == [name for name, _ in draft.hf_weights()]
        assert all(torch.equal(exported[name], tensor) for name, tensor in draft.hf_weights())

    draft.zero_grad()
    loss_of(draft, 0, layouts[0], counts_of(draft, 0, layouts[0])).backward()
    cut = PackedZigzag(LENGTHS[0], cp_size=2)
    for transport in ("gather", "ring"):
        assert_gradients(found[0][transport][0], draft, f"context parallel, {transport}")
        together_TN = cut.unshard([found[rank][transport][1] for rank in (0, 1)])
        assert torch.equal(together_TN, proposals(draft, 0, layouts[0]))
