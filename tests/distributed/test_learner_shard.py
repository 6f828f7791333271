"""The whole optimizer step with both models sharded (FSDP2) equals one rank: gradients, metrics, skips, state."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import results_of
from learner_cases import VOCAB, first_step, make_config, make_learner, make_samples, update
from safetensors.torch import load_file

from torchspec import checkpoint
from torchspec.config import Config, ParallelismConfig
from torchspec.losses.config import RLConfig
from torchspec.optim.config import OptimizerConfig
from torchspec.ranks import Ranks
from torchspec.trainer import CoTrainer

pytestmark = pytest.mark.parity
SEED = int(torch.empty((), dtype=torch.int64).random_(2**31))
ALONE = ParallelismConfig()
SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-2)  # AdamW's usual eps turns the last bits of small gradients into steps


class Trainer(CoTrainer):
    """A trainer's models on this rank, without environment and engine."""

    poison = ""

    def __init__(self, config: Config, output_dir: str | Path = "nowhere", poison: str = "") -> None:
        super().__init__(config, output_dir)
        self.poison = poison
        self.device, self.compute_dtype = torch.device("cpu"), getattr(torch, config.train.compute_dtype)
        self.tokenizer, self.part = range(VOCAB), None
        self.ranks = Ranks(config.parallelism.context_parallel_degree)
        self._build_whole()
        self.init_draft(lambda: torch.arange(VOCAB))
        self.prompts = type("Prompts", (), {"cursor": 0})()

    def build_policy(self) -> Any:
        policy = super().build_policy()
        with torch.no_grad():
            if self.poison == "everywhere":
                policy.model.norm.weight[0] = torch.nan
            if self.poison == "one token":
                policy.embed_weight[VOCAB - 1] = torch.nan
        return policy


def on_ranks(world: int, function: Any, *args: Any) -> list:
    """``function(*args)`` on ranks as torchrun starts them."""
    return results_of(_on_rank, world, world, function, args)


def _on_rank(rank: int, world: int, function: Any, args: tuple) -> Any:
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world), str(rank)
    return function(*args)


def trainer_step(config: Config, samples: list, poison: str = "", compiled: bool = False) -> dict:
    trainer = Trainer(config, poison=poison)
    if compiled:  # as draft.compile does, without a compiler for C++
        trainer.draft.forward = torch.compile(trainer.draft.forward, fullgraph=True, backend="aot_eager")
    found = first_step(trainer.learner, samples)
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.runner.weights()}
    found["draft_weights"] = {name: tensor.clone() for name, tensor in trainer._draft_weights() or ()}
    return found


def case_config(cp: int = 1, *, rl: dict | None = None, draft: dict | None = None, dtype="float32", **policy) -> Config:
    config = make_config(rl=RLConfig(prompts_per_step=4, samples_per_prompt=2, **(rl or {})))
    return dataclasses.replace(
        config,
        policy=dataclasses.replace(config.policy, **policy),
        draft=dataclasses.replace(config.draft, **(draft or {})),
        train=dataclasses.replace(config.train, compute_dtype=dtype),
        parallelism=ParallelismConfig(context_parallel_degree=cp, shard=True),
    )


def without(config: Config, parallelism: ParallelismConfig = ALONE) -> Config:
    return dataclasses.replace(config, parallelism=parallelism)


def assert_equal(found: dict, expected: dict, *, tolerance=2e-6, floor=0.01, metrics=2e-5) -> None:
    """Gradients equal by norm; one below ``floor`` of its model's whole gradient (a norm's, of a sum that cancels) is
    measured by that."""
    assert found["skipped"] == expected["skipped"] and not found["skipped"]
    for model in ("policy", "draft"):
        assert found[model].keys() == expected[model].keys()
        least = floor * torch.stack([want.norm() for want in expected[model].values() or [torch.zeros(1)]]).norm()
        for name, want in expected[model].items():
            error = (found[model][name] - want).norm() / want.norm().clamp_min(least).clamp_min(1e-6)
            assert error < tolerance, (SEED, model, name, float(error))
    assert found["metrics"].keys() == expected["metrics"].keys()
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=metrics, abs=1e-6), (SEED, key)


def compare(world: int, config: Config, samples: list, *options: Any) -> list[dict]:
    alone = make_learner(without(config))
    weights = dict(alone.policy.hf_weights())
    draft_weights = dict(alone.draft.hf_weights()) if alone.draft is not None else {}
    expected = first_step(alone, samples)
    ranks = on_ranks(world, trainer_step, config, samples, *options)
    for found in ranks:
        assert_equal(found, expected)
        for name, want in (("weights", weights), ("draft_weights", draft_weights)):
            assert found[name].keys() == want.keys()
            assert all(torch.equal(found[name][key], tensor) for key, tensor in want.items())
    return ranks


CASES = {
    "kl, some packs the draft's alone": case_config(rl=dict(kl_coef=0.1), tie_word_embeddings=False),
    "tied, recomputation": case_config(tie_word_embeddings=True, activation_checkpoint=True),
    "context parallel, tied, whole sequences": case_config(2, rl=dict(ratio="sequence", kl_coef=0.1)),
    "context parallel, recomputation": case_config(2, activation_checkpoint=True, tie_word_embeddings=False),
    "two updates, extra draft steps": case_config(rl=dict(updates_per_rollout=2), draft=dict(extra_steps=1)),
    "draft vocabulary and gate": case_config(draft=dict(objective="hard_ce", vocab_size=30, position_gate=True)),
    "plain RL": case_config(draft=dict(enabled=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_two_shards_change_nothing(name):
    compare(2, CASES[name], make_samples(SEED, live=lambda i: i < 6))


@pytest.mark.slow
@pytest.mark.parametrize("world, cp", [(3, 1), (4, 1), (4, 2)])
def test_more_shards_change_nothing(world, cp):
    config = case_config(cp, rl=dict(kl_coef=0.1), draft=dict(extra_steps=1), tie_word_embeddings=True)
    compare(world, config, make_samples(SEED, live=lambda i: i < 6))


def test_a_rank_without_a_sample_runs_on_padding():
    compare(2, case_config(), make_samples(SEED, live=lambda i: i == 0))


def test_a_compiled_draft():
    compare(2, case_config(), make_samples(SEED), "", True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_shards_round_where_replicas_round(dtype, tied):
    config, samples = case_config(dtype=dtype, tie_word_embeddings=tied), make_samples(SEED)
    replicas = on_ranks(2, trainer_step, without(config), samples)
    for found, expected in zip(on_ranks(2, trainer_step, config, samples), replicas):
        assert_equal(found, expected, tolerance=1e-6, floor=0.0)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("poison", ["everywhere", "one token"])
def test_nan_is_skipped_by_all_ranks_together(poison, cp):
    samples = make_samples(SEED)
    for i, sample in enumerate(samples):  # one sequence has the token, so that one rank alone may see it
        ids = sample.prompt.token_ids
        ids[:] = [min(token, VOCAB - 2) for token in ids]
        sample.completion.token_ids[:] = [min(token, VOCAB - 2) for token in sample.completion.token_ids]
        if i == 0:
            ids[0] = VOCAB - 1
    for found in on_ranks(2, trainer_step, case_config(cp, tie_word_embeddings=False), samples, poison):
        assert found["skipped"] and not found["policy"] and not found["draft"]


# ---- several steps, state, exports ---------------------------------------------------------------------------------


def several_steps(config: Config, folder: Path, step: int, rollouts: list[list]) -> dict:
    """Updates on ``rollouts`` after those of checkpoint ``step`` (0: none), then a checkpoint and an export."""
    trainer = Trainer(config, folder)
    if step:
        trainer.restore(checkpoint.load_checkpoint(folder / "checkpoints", step))
    for samples in rollouts:
        assert not update(trainer.learner, samples).skipped
    trainer.step += len(rollouts)
    trainer.save()
    trainer.tokenizer = None
    trainer.export()
    optimizers = (trainer.learner.policy_optimizer, trainer.learner.draft_optimizer)
    state = [p for optimizer in optimizers for p in optimizer.params]
    moments = [s for optimizer in optimizers for s in optimizer.adamw.state.values()]
    state += [s[name] for s in moments for name in ("exp_avg", "exp_avg_sq")]
    local = [getattr(x, "_local_tensor", x) for x in state]
    return {
        "whole": sum(x.nbytes for x in state),
        "here": sum(x.untyped_storage().nbytes() for x in local),
        "least": sum(-(-x.shape[0] // trainer.ranks.world) * x[0].numel() * x.element_size() for x in state),
    }


def stepping_config() -> Config:
    config = case_config(rl=dict(kl_coef=0.1, updates_per_rollout=2), tie_word_embeddings=True)
    return dataclasses.replace(
        config,
        policy=dataclasses.replace(config.policy, optimizer=SMOOTH),
        draft=dataclasses.replace(config.draft, optimizer=SMOOTH),
    )


def assert_states_equal(found: dict, expected: dict, path: str = "") -> None:
    assert found.keys() == expected.keys(), path
    for name, want in expected.items():
        if isinstance(want, dict):
            assert_states_equal(found[name], want, f"{path}/{name}")
        elif isinstance(want, torch.Tensor):
            got = found[name]
            assert type(got) is torch.Tensor and (got.dtype, got.shape) == (want.dtype, want.shape), f"{path}/{name}"
            error = (got - want).double().norm() / want.double().norm().clamp_min(1e-6)
            assert error < 1e-5, (SEED, f"{path}/{name}", float(error))
        else:
            assert found[name] == want, f"{path}/{name}"


def test_a_run_goes_on_with_another_number_of_ranks_sharded_or_not(tmp_path):
    config, alone, several = stepping_config(), tmp_path / "alone", tmp_path / "several"
    rollouts = [make_samples(SEED + number, live=lambda i: i < 6) for number in range(3)]
    several_steps(without(config), alone, 0, rollouts)
    whole_run = checkpoint.load_checkpoint(alone / "checkpoints", 3)
    bytes_of_two = on_ranks(2, several_steps, config, several, 0, rollouts[:1])
    several_steps(without(config), several, 1, rollouts[1:2])
    on_ranks(2, several_steps, config, several, 2, rollouts[2:])
    assert_states_equal(checkpoint.load_checkpoint(several / "checkpoints", 3), whole_run)
    for model in ("policy", "draft"):
        files = [load_file(folder / model / "model.safetensors") for folder in (several, alone)]
        assert_states_equal(*files)
    sizes = [(folder / "checkpoints" / "step-3" / "state-0.pt").stat().st_size for folder in (several, alone)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)  # no slice's hidden storage is written
    for found in bytes_of_two:
        assert found["here"] <= found["least"] < 0.55 * found["whole"]
