"""The whole optimizer step with the policy cut into pipeline stages equals one rank: gradients, metrics, skips."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from gloo_ranks import results_of
from learner_cases import VOCAB, first_step, make_config, make_learner, make_samples

from torchspec.checkpoint import _union
from torchspec.config import Config, ParallelismConfig
from torchspec.losses.config import RLConfig
from torchspec.pipeline.config import PipelineConfig
from torchspec.ranks import Ranks
from torchspec.trainer import CoTrainer

pytestmark = pytest.mark.parity
SEED = int(torch.empty((), dtype=torch.int64).random_(2**31))


def pipelined_trainer(config: Config) -> CoTrainer:
    """A trainer's models on this rank, without environment and engine."""
    trainer = CoTrainer(config, "nowhere")
    trainer.device, trainer.compute_dtype = torch.device("cpu"), getattr(torch, config.train.compute_dtype)
    trainer.tokenizer, trainer.part = range(VOCAB), None
    trainer.ranks = Ranks(config.parallelism.context_parallel_degree, pp_size=config.pipeline.ranks, pp_timeout_s=60)
    trainer._build_pipeline()
    trainer.init_draft(lambda: torch.arange(VOCAB))
    return trainer


def on_rank(rank: int, world: int, config: Config, samples: list, poison: bool) -> dict:
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world), str(rank)
    trainer = pipelined_trainer(config)
    if poison and trainer.runner.holds_head:
        with torch.no_grad():
            trainer.policy.model.norm.weight[0] = torch.nan
    found = first_step(trainer.learner, samples)
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.runner.weights()}
    found["draft_weights"] = {name: tensor.clone() for name, tensor in trainer._draft_weights()}
    return found


def on_ranks(world: int, config: Config, samples: list, poison: bool = False) -> list[dict]:
    return results_of(on_rank, world, world, config, samples, poison)


def case_config(
    schedule: str,
    pp: int,
    cp: int = 1,
    *,
    rl: dict | None = None,
    draft: dict | None = None,
    pipeline: dict | None = None,
    **policy: Any,
) -> Config:
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, **(rl or {})))
    return dataclasses.replace(
        config,
        policy=dataclasses.replace(config.policy, num_layers=8, **policy),
        draft=dataclasses.replace(config.draft, tap_ids=(1, 4, 8), **(draft or {})),
        train=dataclasses.replace(config.train, compute_dtype="float32"),
        parallelism=ParallelismConfig(context_parallel_degree=cp),
        pipeline=PipelineConfig(ranks=pp, schedule=schedule, deadline_s=60, **(pipeline or {})),
    )


def compare(world: int, config: Config, samples: list, *, draft_tolerance: float = 2e-6) -> list[dict]:
    alone = dataclasses.replace(config, pipeline=PipelineConfig(), parallelism=ParallelismConfig())
    expected = first_step(make_learner(alone), samples)
    ranks = on_ranks(world, config, samples)
    assert {name for found in ranks for name in found["policy"]} == set(expected["policy"])
    assert any(found["draft"] for found in ranks) == config.draft.enabled
    for found in ranks:
        assert not found["skipped"]
        for model, tolerance in (("policy", 2e-6), ("draft", draft_tolerance)):
            for name, gradient in found[model].items():
                want = expected[model][name]
                # Rounding goes by the terms of a sum: a small gradient in which they cancel is measured by the model's.
                whole = torch.stack([g.norm() for g in expected[model].values()]).norm()
                error = (gradient - want).norm() / want.norm().clamp_min(1e-2 * whole)
                assert error < tolerance, (SEED, model, name, float(error))
        assert found["metrics"].keys() == expected["metrics"].keys()
        for key, value in expected["metrics"].items():
            assert found["metrics"][key] == pytest.approx(value, rel=2e-5, abs=1e-6), (SEED, key)
    return ranks


CASES = {
    "1F1B, kl, some packs the draft's alone": (2, case_config("1F1B", 2, rl=dict(kl_coef=0.1))),
    "deferred, tied": (2, case_config("1F1B", 2, draft=dict(schedule="deferred"), tie_word_embeddings=True)),
    "interleaved, deferred": (2, case_config("Interleaved1F1B", 2, draft=dict(schedule="deferred"))),
    "V, tied on one rank": (2, case_config("ZBVZeroBubble", 2, tie_word_embeddings=True)),
    "V, deferred": (2, case_config("ZBVZeroBubble", 2, draft=dict(schedule="deferred"))),
    "DualPipeV": (2, case_config("DualPipeV", 2)),
    "GPipe, extra draft steps, two updates": (
        2,
        case_config("GPipe", 2, rl=dict(updates_per_rollout=2), draft=dict(extra_steps=1)),
    ),
    "draft on the first stage": (2, case_config("1F1B", 2, draft=dict(stage=0, schedule="deferred"))),
    "recomputation": (2, case_config("LoopedBFS", 2, activation_checkpoint=True)),
    "one stage a rank of a looped schedule": (2, case_config("Interleaved1F1B", 2, pipeline=dict(stages_per_rank=1))),
    "fewer slots than would run": (
        2,
        case_config("1F1B", 2, draft=dict(stage=0, schedule="deferred"), pipeline=dict(tap_slots=1)),
    ),
    "draft vocabulary and gate": (
        2,
        case_config("1F1B", 2, draft=dict(objective="hard_ce", vocab_size=30, position_gate=True)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_stages_change_nothing(name):
    world, config = CASES[name]
    compare(world, config, make_samples(SEED, live=lambda i: i < 6))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("when", ["inline", "deferred"])
def test_four_stages_change_nothing(schedule, when):
    compare(4, case_config(schedule, 4, draft=dict(schedule=when)), make_samples(SEED))


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2], ids=["with data parallel", "with context parallel"])
def test_with_the_other_dimensions(cp):
    config = case_config("1F1B", 2, cp, rl=dict(ratio="sequence", kl_coef=0.1), tie_word_embeddings=True)
    compare(4, config, make_samples(SEED, live=lambda i: i < 6))


def test_plain_rl_and_every_rank_gets_all_weights():
    config = case_config("1F1B", 2, draft=dict(enabled=False))
    expected = dict(make_learner(dataclasses.replace(config, pipeline=PipelineConfig())).policy.hf_weights())
    for found in compare_without_draft(config):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def compare_without_draft(config: Config) -> list[dict]:
    return results_of(weights_on_rank, 2, 2, config, make_samples(SEED))


def weights_on_rank(rank: int, world: int, config: Config, samples: list) -> dict:
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world), str(rank)
    trainer = pipelined_trainer(config)
    weights = {name: tensor.clone() for name, tensor in trainer.runner.weights()}
    assert not trainer.learner.update(samples, 1, lambda done, total: None).skipped
    moved = dict(trainer.runner.weights())
    assert all(not torch.equal(moved[name], weights[name]) for name in weights)
    return weights


def test_nan_is_skipped_by_all_ranks_together():
    for found in on_ranks(2, case_config("1F1B", 2), make_samples(SEED), poison=True):
        assert found["skipped"] and not found["policy"] and not found["draft"]


def state_on_rank(rank: int, world: int, config: Config, samples: list, file: str) -> dict:
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world), str(rank)
    trainer = pipelined_trainer(config)
    if file:
        trainer.learner.load_state_dict(torch.load(file))
    trainer.learner.update(samples, 1, lambda done, total: None)
    return trainer.learner.state_dict()


def test_state_goes_from_four_stages_to_one_rank_and_back(tmp_path):
    config = case_config("1F1B", 4, tie_word_embeddings=True)
    states = _union(results_of(state_on_rank, 4, 4, config, make_samples(SEED), ""))
    alone = make_learner(dataclasses.replace(config, pipeline=PipelineConfig()), seed=99)
    alone.load_state_dict(states)
    assert alone.policy_optimizer.num_steps == alone.draft_optimizer.num_steps == 1
    two = dataclasses.replace(config, pipeline=PipelineConfig(ranks=2, deadline_s=60))
    torch.save(states, tmp_path / "states.pt")
    again = _union(results_of(state_on_rank, 2, 2, two, make_samples(SEED + 1), str(tmp_path / "states.pt")))
    alone.update(make_samples(SEED + 1), 1, lambda done, total: None)
    expected = alone.state_dict()
    for model in ("policy", "draft"):
        for name, tensor in expected[model].items():
            assert (again[model][name] - tensor).norm() <= 1e-5 * tensor.norm(), (SEED, name)


def test_samples_fewer_than_microbatches_run_on_padding():
    compare(
        2, case_config("Interleaved1F1B", 2), make_samples(SEED, count=8, live=lambda i: i == 0), draft_tolerance=4e-6
    )
