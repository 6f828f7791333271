"""The DTensor handlers of branch_attention: placements, tensor parallel beside it, lse, refusals."""

from __future__ import annotations

import re

import cp_ranks
import pytest
import torch
from cp_ranks import DIM, GROUPS, LENGTHS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchspec.attention import branch_attention
from torchspec.attention.oracle import dense_branch_attention
from torchspec.context_parallel import dispatch
from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.trunk import Trunk, packed_attention

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]
RATIO, SCALE = 3, 0.3


def inputs() -> list[torch.Tensor]:
    """q, k0, v0, kb, vb, weight of out, weight of lse for the real pack, fp64."""
    generator = torch.Generator().manual_seed(11)
    heads = (GROUPS * RATIO, GROUPS, GROUPS, GROUPS, GROUPS, GROUPS * RATIO)
    tensors = [torch.randn(sum(LENGTHS), h, DIM, generator=generator, dtype=torch.float64) for h in heads]
    return [*tensors, torch.randn(sum(LENGTHS), GROUPS * RATIO, generator=generator, dtype=torch.float64)]


def loss_of(function, layout, q, k0, v0, kb, vb, weight, lse_weight, **options):
    out, lse = function(q, k0, v0, [kb], [vb], layout.cu_seqlens, layout.max_seqlen, SCALE, **options)
    return (out * weight).sum() + (lse * lse_weight).sum()


def lse_gradients(mesh) -> dict:
    """Gradients of a loss that reads out and lse, for both transports."""
    found = {}
    for transport in ("gather", "ring"):
        layout = PackedZigzag(LENGTHS, cp_mesh=mesh)
        local = [layout.shard(x) for x in inputs()]
        leaves = [DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_() for x in local[:5]]
        weights = [DTensor.from_local(x, mesh, [Shard(0)]) for x in local[5:]]
        loss = loss_of(branch_attention, layout, *leaves, *weights, transport=transport)
        loss.redistribute(placements=[Replicate()]).to_local().backward()
        found[transport] = [x.grad.to_local() for x in leaves]
    return found


def placements(mesh) -> dict:
    """Replicated inputs, and Replicate and Partial gradients, against row-sharded ones."""
    layout = PackedZigzag(LENGTHS, cp_mesh=mesh)
    rows = [DTensor.from_local(layout.shard(x), mesh, [Shard(0)]) for x in inputs()]
    q, k0, v0, kb, vb, do, _ = rows
    scalars = (layout.cu_seqlens, layout.max_seqlen, SCALE, 0, 1, 0, "gather")
    out, lse = torch.ops.torchspec.branch_attention(q, k0, v0, [kb], [vb], [], *scalars)
    spread = [x.redistribute(placements=[Replicate()]) for x in (q, k0, v0, kb, vb)]
    out2, lse2 = torch.ops.torchspec.branch_attention(*spread[:3], [spread[3]], [spread[4]], [], *scalars)

    def backward(grad):
        found = torch.ops.torchspec.branch_attention_backward(
            grad, None, q, k0, v0, [kb], [vb], out, lse, False, *scalars
        )
        return [x.to_local() for x in (*found[:3], *found[3], *found[4])]

    replicated = do.redistribute(placements=[Replicate()])
    partial = DTensor.from_local(replicated.to_local() / mesh.size(), mesh, [Partial()])
    want = backward(do)
    return {
        "inputs": torch.equal(out.to_local(), out2.to_local()) and torch.equal(lse.to_local(), lse2.to_local()),
        "replicate": all(torch.equal(a, b) for a, b in zip(backward(replicated), want)),
        "partial": all(torch.allclose(a, b, atol=1e-13, rtol=0) for a, b in zip(backward(partial), want)),
    }


def message(function) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


def refusals(mesh) -> dict:
    layout = PackedZigzag(LENGTHS, cp_mesh=mesh)
    q, k0, v0, kb, vb, *_ = (DTensor.from_local(layout.shard(x), mesh, [Shard(0)]) for x in inputs())
    tail = (layout.cu_seqlens, layout.max_seqlen, SCALE)
    other = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("a", "b"))
    odd = DTensor.from_local(torch.zeros(2, 3, DIM), other, [Replicate(), Shard(1)])
    tp = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("cp", "tp"))
    heads = DTensor.from_local(torch.zeros(4, 3, DIM), tp, [Shard(0), Replicate()]).redistribute(
        placements=[Shard(0), Shard(1)]
    )
    uneven = torch.tensor([0, 6, 6 + 2 * mesh.size()], dtype=torch.int32)
    some = DTensor.from_local(torch.zeros(5, 2, DIM), mesh, [Shard(0)])
    return {
        "plain": message(
            lambda: torch.ops.torchspec.branch_attention(q, k0, v0, [kb], [vb.to_local()], [], *tail, 0, 1, 0, "gather")
        ),
        "transport": message(lambda: branch_attention(q, k0, v0, [], [], *tail, transport="pigeon")),
        "gathered": message(lambda: branch_attention(q, k0, v0, [], [], *tail, transport="gathered")),
        "names": message(lambda: branch_attention(odd, odd, odd, [], [], *tail)),
        "heads": message(lambda: branch_attention(heads, heads, heads, [], [], *tail)),
        "padding": message(lambda: branch_attention(some, some, some, [], [], uneven, 6, SCALE)),
        "rows": message(lambda: Trunk(layout).attend(q.to_local()[1:], k0.to_local()[1:], v0.to_local()[1:])),
        "mesh": message(lambda: PackedZigzag(LENGTHS, cp_mesh=other)),
        "no mesh": message(
            lambda: packed_attention(*(x.to_local() for x in (q, k0, v0)), PackedZigzag(LENGTHS, cp_size=2))
        ),
    }


def everything(mesh) -> dict:
    """More ranks than tokens too: most rows are padding, on some ranks all."""
    layout = PackedZigzag([1], cp_mesh=mesh)
    one = layout.shard(torch.ones(1, 2, DIM, dtype=torch.float64)).requires_grad_()
    out = Trunk(layout).attend(one, one, one)
    (grad,) = torch.autograd.grad((out * layout.real_T[:, None, None]).sum(), one)
    few = (float(out.detach()[layout.real_T].sum()), float(grad.sum()))
    return {
        "lse": lse_gradients(mesh),
        "placements": placements(mesh),
        "refusals": refusals(mesh),
        "few": few,
    }


@pytest.fixture(scope="module")
def ranks():
    return cp_ranks.run_ranks(2, everything)


@pytest.mark.parametrize("transport", ["gather", "ring"])
def test_gradient_of_lse(ranks, transport):
    layout = PackedZigzag(LENGTHS)
    leaves = [x.requires_grad_(index < 5) for index, x in enumerate(inputs())]
    loss_of(dense_branch_attention, layout, *leaves).backward()
    two = PackedZigzag(LENGTHS, cp_size=2)
    for index, leaf in enumerate(leaves[:5]):
        assert (two.unshard([r["lse"][transport][index] for r in ranks]) - leaf.grad).abs().max() < 1e-12


def test_other_placements_are_redistributed(ranks):
    for r in ranks:
        assert r["placements"] == {"inputs": True, "replicate": True, "partial": True}


def test_more_ranks_than_tokens(ranks):
    outs, grads = zip(*(r["few"] for r in ranks))
    assert sum(outs) == 2 * DIM and sum(grads) == 2 * DIM


@pytest.mark.parametrize(
    "what,sentence",
    [
        ("plain", "1 plain tensor"),
        ("transport", "knows gather, ring and gathered"),
        ("gathered", "A gathered trunk is placed"),
        ("names", "no context-parallel dimension"),
        ("heads", "cannot be split over 2 tensor-parallel ranks"),
        ("padding", "padded to a multiple of 4"),
        ("rows", "The layout gives this rank"),
        ("mesh", "the one context-parallel dimension"),
        ("no mesh", "needs a layout with a cp_mesh"),
    ],
)
def test_refusals(ranks, what, sentence):
    for r in ranks:
        assert re.search(sentence, r["refusals"][what]), r["refusals"][what]


def heads_and_rows(mesh) -> list:
    """cp = 2 beside tp = 2: each rank holds its rows of its heads."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    layout = PackedZigzag(LENGTHS, cp_mesh=grid["cp"])
    part = grid.get_local_rank("tp")
    found = []
    for transport in ("gather", "ring"):
        local = [layout.shard(x.chunk(2, dim=1)[part]) for x in inputs()]
        place = [Shard(0), Shard(1)]
        leaves = [DTensor.from_local(x.contiguous(), grid, place).requires_grad_() for x in local[:5]]
        q, k0, v0, kb, vb = leaves
        out, lse = branch_attention(
            q, k0, v0, [kb], [vb], layout.cu_seqlens, layout.max_seqlen, SCALE, transport=transport
        )
        loss = (out.to_local() * local[5]).sum() + (lse.to_local() * local[6]).sum()
        loss.backward()
        found.append([x.grad.to_local() for x in leaves])
    return found


def test_tensor_parallel_beside_context_parallel():
    results = cp_ranks.run_ranks(4, heads_and_rows)
    layout = PackedZigzag(LENGTHS)
    leaves = [x.requires_grad_(index < 5) for index, x in enumerate(inputs())]
    loss_of(dense_branch_attention, layout, *leaves).backward()
    two = PackedZigzag(LENGTHS, cp_size=2)
    for transport in (0, 1):
        for index, leaf in enumerate(leaves[:5]):
            halves = [two.unshard([results[2 * cp + tp][transport][index] for cp in (0, 1)]) for tp in (0, 1)]
            assert (torch.cat(halves, dim=1) - leaf.grad).abs().max() < 1e-12


def test_the_private_table_still_exists():
    """DTensor's table of custom handlers (torch 2.13) holds ours, also after PyTorch's CP swapped it."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    op = torch.ops.torchspec.branch_attention.default
    _attention._enable_cp_dtensor_dispatcher()
    assert DTensor._op_dispatcher._custom_op_handlers[op] is dispatch.HANDLERS[op]
    _attention._disable_cp_dtensor_dispatcher()
    assert DTensor._op_dispatcher._custom_op_handlers[op] is dispatch.HANDLERS[op]
