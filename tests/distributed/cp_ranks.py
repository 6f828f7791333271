"""Ranks for the context-parallel tests: what they compute.

Every worker returns plain data (tensors, numbers); the comparison with the one-rank fp64 oracle happens in
the test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gloo_ranks import results_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.context_parallel.trunk import Trunk, packed_attention
from torchspec.context_parallel.wire import WireCounter

LENGTHS = [13, 1, 22]
"""Ragged: one document of a single token, one longer than half the pack."""
GROUPS, DIM, PASSES = 2, 8, 3


def _on_mesh(rank: int, world: int, function: Callable, args: tuple):
    return function(init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), *args)


def run_ranks(world: int, function: Callable, *args) -> list:
    """``function(mesh, *args)`` on ``world`` gloo ranks: their results in rank order."""
    return results_of(_on_mesh, world, world, function, args)


def leaves(ratio: int, passes: int = PASSES, seed: int = 0, lengths=LENGTHS) -> list[list[torch.Tensor]]:
    """Per pass: q, k, v and the weight of its output, fp64, for the real pack."""
    generator = torch.Generator().manual_seed(seed + ratio)
    heads = (GROUPS * ratio, GROUPS, GROUPS, GROUPS * ratio)
    rows = sum(lengths)
    return [[torch.randn(rows, h, DIM, generator=generator, dtype=torch.float64) for h in heads] for _ in range(passes)]


def unroll(trunk, passes: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of all passes and the gradient of every q, k, v of sum(out * weight); pass k's query depends on
    pass k-1's output, so gradients cross passes."""
    inputs = [x.detach().requires_grad_() for p in passes for x in p[:3]]
    outs, loss, previous = [], 0.0, 0.0
    for index, p in enumerate(passes):
        q, k, v = inputs[3 * index : 3 * index + 3]
        out = trunk.attend(q + 0.1 * previous, k, v)
        loss = loss + (out * p[3]).sum()
        outs.append(out)
        previous = out
    return [o.detach() for o in outs], list(torch.autograd.grad(loss, inputs))


def policy_layer(layout: PackedZigzag, window: int, q, k, v, weight):
    """Output and gradients of one policy layer."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = packed_attention(*inputs, layout, window=window)
    return [out.detach()], list(torch.autograd.grad((out * weight).sum(), inputs))


def shards(layout: PackedZigzag, passes, dtype) -> list[list[torch.Tensor]]:
    return [[layout.shard(x).to(dtype) for x in p] for p in passes]


CASES = [
    (ratio, window, transport, dtype)
    for ratio in (1, 3, 4)
    for window in (0, 5)
    for transport in ("gather", "ring")
    for dtype in (torch.float64, torch.float32)
]


def exactness(mesh: DeviceMesh) -> dict:
    """Every case: outputs and gradients of this rank's rows."""
    found = {}
    for ratio, window, transport, dtype in CASES:
        layout = PackedZigzag(LENGTHS, cp_mesh=mesh, trunk_transport=transport)
        passes = shards(layout, leaves(ratio), dtype)
        found[("draft", ratio, window, transport, dtype)] = unroll(Trunk(layout, window=window), passes)
        found[("policy", ratio, window, transport, dtype)] = policy_layer(layout, window, *passes[0])
    return found


SHIFTS = (0, 1, 2, 3, 5, 12, 21, 40)


def shifting(mesh: DeviceMesh) -> dict:
    """Values of every dtype and the gradient, for every n."""
    layout = PackedZigzag(LENGTHS, cp_mesh=mesh)
    found = {}
    for n in SHIFTS:
        ids, rows, weight = shift_inputs()
        # what stands on padding rows must never be read
        poison = torch.where(layout.real_T[:, None], layout.shard(rows), torch.nan).requires_grad_()
        shifted = layout.shift(poison, n)
        (grad,) = torch.autograd.grad((shifted * layout.shard(weight)).sum(), poison)
        found[n] = {
            "ids": layout.shift(layout.shard(ids), n),
            "mask": layout.shift(layout.shard(ids % 2 == 0), n),
            "bf16": layout.shift(layout.shard(rows.bfloat16()), n),
            "rows": shifted.detach(),
            "grad": torch.where(layout.real_T[:, None], grad, torch.zeros_like(grad)),
        }
    return found


def shift_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    ids = torch.arange(100, 100 + total)
    rows, weight = (torch.randn(total, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return ids, rows, weight


def wire(mesh: DeviceMesh) -> dict:
    """Units sent per draft layer (K passes) and per policy layer, and the names of the collectives."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for transport in ("gather", "ring"):
            layout = PackedZigzag(LENGTHS, cp_mesh=mesh, trunk_transport=transport)
            unit = layout.num_tokens * 2 * GROUPS * DIM * dtype.itemsize
            for k in (1, 3, 7):
                passes = shards(layout, leaves(3, k), dtype)
                with WireCounter(mesh.size(), mesh.get_local_rank()) as counter:
                    unroll(Trunk(layout), passes)
                found[(transport, dtype, k)] = (counter.bytes / unit, counter.calls)
            with WireCounter(mesh.size(), mesh.get_local_rank()) as counter:
                policy_layer(layout, 0, *shards(layout, leaves(3, 1), dtype)[0])
            found[(transport, dtype, "policy")] = (counter.bytes / unit, counter.calls)
    return found


def saved(mesh: DeviceMesh) -> dict:
    """Bytes saved for backward after 1..5 passes, and every saved storage's size (local, de-duplicated)."""
    found = {}
    for transport in ("gather", "ring"):
        layout = PackedZigzag(LENGTHS, cp_mesh=mesh, trunk_transport=transport)
        sizes, all_storages = [], {}
        for k in range(1, 6):
            passes = shards(layout, leaves(3, k), torch.float32)
            storages: dict[int, int] = {}
            keep = []

            def pack(x):
                local = getattr(x, "_local_tensor", x)
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()  # noqa: B023
                keep.append(local)  # noqa: B023  a freed storage's address could come again
                return x

            trunk = Trunk(layout)
            inputs = [[x.detach().requires_grad_() for x in p] for p in passes]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                for q, key, v, _ in inputs:
                    keep.append(trunk.attend(q, key, v))
            sizes.append(sum(storages.values()))
            all_storages = storages
        found[transport] = (sizes, sorted(all_storages.values()), layout.num_tokens, layout.num_tokens_global)
    return found


def compiled(mesh: DeviceMesh) -> dict:
    """Whether one fullgraph aot_eager graph gives bit-equal outputs and gradients, for each transport."""
    found = {}

    def step(x, layout):
        trunk, total, q = Trunk(layout), 0.0, x
        for index in range(PASSES):
            out = trunk.attend(q, q[:, :2] * (1 + index), q[:, 2:4] * 0.3)
            total = total + (layout.shift(out, index) * (index + 1)).sin().sum()
            q = out + x * 0.1
        return total

    for transport in ("gather", "ring"):
        torch._dynamo.reset()
        layout = PackedZigzag(LENGTHS, cp_mesh=mesh, trunk_transport=transport)
        x = layout.shard(leaves(3)[0][0]).requires_grad_()
        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            loss = function(x, layout)
            results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
        found[transport] = all(torch.equal(a, b) for a, b in zip(*results))
    return found


def far_away(mesh: DeviceMesh) -> dict:
    """Rows whose value gets a gradient from the last real row of the third document only."""
    found = {}
    for transport in ("gather", "ring"):
        layout = PackedZigzag(LENGTHS, cp_mesh=mesh, trunk_transport=transport)
        q, k, v, _ = shards(layout, leaves(1), torch.float64)[0]
        v.requires_grad_()
        out = Trunk(layout).attend(q, k, v)
        last = (layout.doc_ids_T == 2) & (layout.positions_T == 21)
        (grad,) = torch.autograd.grad((out * last[:, None, None]).sum(), v)
        found[transport] = grad.abs().amax((1, 2)) > 0
    return found


BF16_LENGTHS = [61, 1, 130]
"""Rows enough that an error by norm is the same for every draw, to a few hundredths."""


def bf16(mesh: DeviceMesh, seed: int) -> dict:
    """Outputs and gradients in bf16 of one policy layer and of K passes, for each transport."""
    found = {}
    for transport in ("gather", "ring"):
        layout = PackedZigzag(BF16_LENGTHS, cp_mesh=mesh, trunk_transport=transport)
        passes = shards(layout, leaves(3, seed=seed, lengths=BF16_LENGTHS), torch.bfloat16)
        found[("draft", transport)] = unroll(Trunk(layout), passes)
        found[("policy", transport)] = policy_layer(layout, 0, *passes[0])
    return found


def everything(mesh: DeviceMesh, seed: int) -> dict:
    functions = [exactness, shifting, wire, saved, far_away]
    if mesh.size() == 4:  # the smallest C at which ranks differ in kind: first, last and between
        functions.append(compiled)
    return {function.__name__: function(mesh) for function in functions} | {"bf16": bf16(mesh, seed)}
