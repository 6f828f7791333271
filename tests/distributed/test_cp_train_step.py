"""One whole train step under context parallelism equals one rank: losses and every gradient.

The policy (torchtitan's layers on packed attention), its taps, the policy loss, the draft's unroll, the
teaching rows that cross ranks and the distillation all run on sharded rows; what is summed over ranks at the
end is what a trainer
sums: losses and parameter gradients.
"""

from __future__ import annotations

import cp_ranks
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchspec.context_parallel.layout import PackedZigzag
from torchspec.data.packing import Sequence, build_batch
from torchspec.draft.config import DraftConfig
from torchspec.draft.eagle3 import Eagle3Draft
from torchspec.losses.config import RLConfig
from torchspec.losses.logprob import token_logprobs
from torchspec.losses.policy import PolicyCounts, policy_counts, policy_loss
from torchspec.policy.config import PolicyConfig

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]
VOCAB = 61
LENGTHS = [(5, 12), (1, 0), (2, 23), (3, 1)]
"""(prompt, response) tokens: ragged, one document of one token, one longer than half the pack."""


def sequences(lengths=LENGTHS) -> list[Sequence]:
    generator = torch.Generator().manual_seed(4)
    draw = lambda n: torch.randint(VOCAB, (n,), generator=generator).tolist()  # noqa: E731
    return [
        Sequence(draw(p), draw(r), engine_logprobs=[-1.0 - 0.01 * i for i in range(r)], advantage=0.5 - index)
        for index, (p, r) in enumerate(lengths)
    ]


def models(dtype: torch.dtype, passes: int = 3):
    from torchspec.policy.titan import build_policy

    config = PolicyConfig(
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=VOCAB,
    )
    policy = build_policy(config, vocab_size=VOCAB, seed=1, device="cpu", dtype=dtype)
    draft = Eagle3Draft.build(DraftConfig(ttt_steps=passes, tap_ids=(1, 2, 3)), policy.shape, seed=2, dtype=dtype)
    return policy, draft


def train_step(policy, draft, layout: PackedZigzag, total=lambda x: x, lengths=LENGTHS) -> dict[str, torch.Tensor]:
    """Losses and gradients; ``total`` sums a tensor over the ranks."""
    whole = build_batch(sequences(lengths))
    rows = {
        name: layout.shard(getattr(whole, f"{name}_T"))
        for name in ("tokens", "targets", "mask", "response", "advantage", "engine_logp")
    }
    out = policy(rows["tokens"], layout, (0, *draft.tap_ids))
    logp_T, _ = token_logprobs(
        out.hidden_TE, policy.head_weight, rows["targets"], temperature=1.0, chunk_rows=16, need_entropy=False
    )
    counts = PolicyCounts(*policy_counts(whole.mask_T, whole.seq_ids_T).tolist())
    loss = policy_loss(
        logp_T,
        logp_T,
        rows["engine_logp"],
        rows["advantage"],
        rows["mask"],
        layout.doc_ids_T,
        RLConfig(),
        counts,
    ).loss
    loss.backward()
    student = draft([out.taps[i] for i in draft.tap_ids], out.taps[0], layout)
    targets = draft.targets(out.hidden_TE.detach(), policy.head_weight, rows["tokens"], rows["response"], layout)
    draft_loss = draft.loss(student, targets, policy.head_weight, total(targets.counts_K)).loss
    draft_loss.backward()
    found = {"policy loss": total(loss.detach()), "draft loss": total(draft_loss.detach())}
    for name, model in (("policy", policy), ("draft", draft)):
        found |= {f"{name} {n}": total(p.grad) for n, p in model.named_parameters()}
    return found


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def step_on_ranks(mesh, lengths) -> dict:
    return {
        (transport, dtype): train_step(
            *models(dtype),
            PackedZigzag([p + r for p, r in lengths], cp_mesh=mesh, trunk_transport=transport),
            all_reduce,
            lengths,
        )
        for transport in ("gather", "ring")
        for dtype in (torch.float64, torch.float32)
    }


CASES = {
    "two ranks": (2, LENGTHS),
    "four ranks": (4, LENGTHS),
    "two ranks of four without a trained token": (4, [(20, 1)]),
    "more ranks than tokens": (4, [(2, 1)]),
}


@pytest.mark.parametrize("case", CASES)
def test_train_step_equals_one_rank(case):
    size, lengths = CASES[case]
    expected = train_step(*models(torch.float64), PackedZigzag([p + r for p, r in lengths]), lengths=lengths)
    assert len(expected) > 40 and (lengths != LENGTHS or all(bool(x.any()) for x in expected.values()))
    for r in cp_ranks.run_ranks(size, step_on_ranks, lengths):
        for (transport, dtype), found in r.items():
            limit = 1e-12 if dtype == torch.float64 else 2e-6
            assert found.keys() == expected.keys()
            for name, want in expected.items():
                error = (found[name].double() - want).norm() / want.norm().clamp_min(1e-3)
                assert error < limit, (transport, dtype, name, float(error))


LONG = [(70, 110), (1, 0), (2, 61), (3, 1)]
"""Rows enough that a weight's gradient is smaller than one hidden state of the whole pack."""


class Largest(TorchDispatchMode):
    """The largest tensor that any op gives, in elements; a Function's and a collective's too."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        local = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
        self.elements = max([self.elements, *(x.numel() for x in local)])
        return result


def memory_on_ranks(mesh) -> dict:
    """Per transport: rows of the pack, the largest tensor, and per K the storages saved for a backward."""
    found = {}
    for transport in ("gather", "ring"):
        layout = PackedZigzag([p + r for p, r in LONG], cp_mesh=mesh, trunk_transport=transport)
        largest, by_passes = Largest(), []
        for passes in range(1, 5):
            policy, draft = models(torch.float32, passes)
            saved: dict[int, torch.Tensor] = {}

            def pack(x):
                local = getattr(x, "_local_tensor", x)
                saved[local.untyped_storage().data_ptr()] = local  # noqa: B023  kept: no address comes twice
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), largest:
                train_step(policy, draft, layout, all_reduce, LONG)
            weights = {p.untyped_storage().data_ptr() for m in (policy, draft) for p in m.parameters()}
            by_passes.append([(x.untyped_storage().nbytes(), x.shape) for a, x in saved.items() if a not in weights])
        found[transport] = (layout.num_tokens_global, largest.elements, by_passes)
    return found


def test_memory_of_the_whole_step():
    """Policy, logprobs, loss, draft, teaching and distillation, forward and backward, on every rank: no tensor of
    T_global E (V > E) elements exists, saved or not; saved rows are the rank's own, but for the draft's one
    gathered K0 | V0; and every pass saves as much as the one before."""
    for r in cp_ranks.run_ranks(4, memory_on_ranks):
        for transport, (rows, largest, by_passes) in r.items():
            assert largest < rows * 48
            for saved in by_passes:
                wide = [size for size, shape in saved if rows in shape or size >= rows * 48 * 4]
                assert wide == ([rows * 2 * 2 * 8 * 4] if transport == "gather" else [])
            totals = [sum(size for size, _ in saved) for saved in by_passes]
            assert len({b - a for a, b in zip(totals, totals[1:])}) == 1, totals
