"""Tiny learners and hand-made samples for the tests of the optimizer step, on one rank and on several."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from torchspec.collect import Prompt, Sample
from torchspec.config import Config, TrainConfig
from torchspec.data.environments import Item
from torchspec.draft.base import build_draft
from torchspec.draft.config import DraftConfig
from torchspec.learner import Learner
from torchspec.losses.config import RLConfig
from torchspec.optim.config import OptimizerConfig
from torchspec.policy.config import PolicyConfig
from torchspec.policy.run import WholePolicy
from torchspec.policy.titan import build_policy
from torchspec.rollout.engine import Completion, Request
from torchspec.shard import whole

VOCAB = 40


def make_config(**changes) -> Config:
    policy = PolicyConfig(
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    draft = DraftConfig(ttt_steps=3, tap_ids=(1, 2, 4), optimizer=OptimizerConfig(lr=1e-3))
    train = TrainConfig(steps=10, tokens_per_microbatch=64, logprob_chunk_rows=16)
    rl = RLConfig(prompts_per_step=4, samples_per_prompt=2)
    return dataclasses.replace(Config(policy=policy, draft=draft, train=train, rl=rl), **changes)


def make_learner(config: Config, seed: int = 0, stop=False, ranks=None) -> Learner:
    policy = build_policy(config.policy, vocab_size=VOCAB, seed=seed, device="cpu")
    draft = None
    if config.draft.enabled:
        draft = build_draft(config.draft, policy.shape, seed=seed)
        draft.init_from_policy(policy.head_weight, policy.embed_weight, torch.arange(VOCAB))
    reference = WholePolicy(copy.deepcopy(policy).requires_grad_(False)) if config.rl.kl_coef else None
    return Learner(config, WholePolicy(policy), draft, reference, stop, ranks)


def make_samples(seed: int, count: int = 8, live=lambda i: True) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, VOCAB, (size,), generator=generator).tolist()

    samples = []
    for i in range(count):
        response = ids(1, 14)
        logprobs = (-torch.rand(len(response), generator=generator) * 4).tolist()
        advantage = float(torch.randn(1, generator=generator)) if live(i) else 0.0
        prompt = Prompt(i // 2, Item("p", "a"), ids(1, 9))
        completion = Completion(response, logprobs, "stop")
        samples.append(Sample(prompt, Request(prompt.token_ids, i), completion, "", advantage=advantage, live=live(i)))
    return samples


def update(learner: Any, samples: list) -> Any:
    return learner.update(samples, 1, lambda done, total: None)


def first_step(learner: Any, samples: list) -> dict:
    """Gradients by name, metrics and the skip of one update whose optimizers do not move."""
    found: dict[str, Any] = {"policy": {}, "draft": {}}
    optimizers = {"policy": learner.policy_optimizer, "draft": learner.draft_optimizer}
    for model, optimizer in optimizers.items():
        if optimizer is None:
            continue

        def keep(model=model, optimizer=optimizer):
            for name, p in optimizer.named.items():
                found[model].setdefault(name, whole(p.grad).clone())
            optimizer.zero_grad()

        optimizer.step = keep
        optimizer.config = dataclasses.replace(optimizer.config, max_grad_norm=0.0)
    result = update(learner, samples)
    metrics = {k: v for k, v in result.metrics.items() if not k.startswith("time/")}
    return found | {"metrics": metrics, "skipped": result.skipped}
