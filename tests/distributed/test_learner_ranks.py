"""The whole optimizer step on data-parallel and context-parallel ranks equals one rank: gradients, metrics, skips."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from cp_ranks import run_ranks
from learner_cases import make_config, make_learner, make_samples

from torchspec.config import ParallelismConfig
from torchspec.losses.config import RLConfig
from torchspec.ranks import Ranks

pytestmark = pytest.mark.parity


def first_step(config, samples, poison: bool = False):
    """(gradients of both models, metrics, skipped) of one update whose optimizers do not move."""
    learner = make_learner(config, ranks=Ranks(config.parallelism.context_parallel_degree))
    if poison:
        with torch.no_grad():
            learner.policy.model.norm.weight[0] = torch.nan
    found = {}
    for name in ("policy", "draft"):
        module, optimizer = getattr(learner, name), getattr(learner, f"{name}_optimizer")
        optimizer.clip = lambda module=module: torch.stack([p.grad.norm() for p in module.parameters()]).norm()

        def keep(name=name, module=module):
            found.setdefault(name, {k: p.grad.clone() for k, p in module.named_parameters()})
            module.zero_grad()

        optimizer.step = keep
    result = learner.update(samples, 1, lambda done, total: None)
    return found, {k: v for k, v in result.metrics.items() if not k.startswith("time/")}, result.skipped


def on_rank(mesh, config, samples, poison):
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(mesh.size()), str(mesh.get_local_rank())
    return first_step(config, samples, poison)


CASES = [
    (2, 1, "gather", {}),
    (2, 2, "gather", {"ratio": "sequence", "loss_norm": "sequence", "tis_level": "sequence"}),
    (2, 2, "ring", {"kl_coef": 0.1, "loss_norm": "constant"}),
    pytest.param(4, 2, "gather", {"updates_per_rollout": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("world, cp, transport, rl", CASES)
def test_ranks_change_nothing(world, cp, transport, rl):
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, **rl))
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, extra_steps=world // 4))
    samples = make_samples(11, live=lambda i: i < 6)  # some packs are the draft's alone
    gradients, metrics, _ = first_step(config, samples)
    split = dataclasses.replace(config, parallelism=ParallelismConfig(cp, transport))
    for found, found_metrics, skipped in run_ranks(world, on_rank, split, samples, False):
        assert not skipped
        for name in gradients:
            for key, expected in gradients[name].items():
                error = (found[name][key] - expected).norm() / expected.norm().clamp_min(1e-6)
                assert error < 1e-5, (name, key, error)
        assert found_metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            assert found_metrics[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key


def test_fewer_sequences_than_ranks_and_a_rank_without_a_trained_token():
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2))
    config = dataclasses.replace(config, draft=dataclasses.replace(config.draft, use_dropped_groups=False))
    samples = make_samples(12, live=lambda i: i == 0)
    gradients, _, _ = first_step(config, samples)
    for found, _, _ in run_ranks(2, on_rank, config, samples, False):
        for name in gradients:
            assert all(torch.allclose(found[name][k], g, atol=1e-6) for k, g in gradients[name].items())


@pytest.mark.parametrize("cp", [1, 2])
def test_nan_is_skipped_by_all_ranks_together(cp):
    config = dataclasses.replace(make_config(), parallelism=ParallelismConfig(cp))
    for found, _, skipped in run_ranks(2, on_rank, config, make_samples(13), True):
        assert skipped and not found
