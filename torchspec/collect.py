"""The first half of an RL step: prompts -> sampled responses -> rewards -> advantages.

Everything here speaks token ids. Text exists only for the scorer and for the eye.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from torchspec.config import Config
from torchspec.data.environments import Environment, Item, score_all
from torchspec.data.tokenizer import decode_response, encode_prompt, stop_token_ids
from torchspec.errors import ConfigError, RunError
from torchspec.losses.config import RLConfig
from torchspec.losses.policy import advantages
from torchspec.rollout.config import SamplingConfig
from torchspec.rollout.engine import Completion, Engine, Request, SpecStats, request_seed

MAX_SKIPPED_IN_A_ROW = 1000


@dataclass
class Prompt:
    """An environment item and its token ids."""

    index: int
    item: Item
    token_ids: list[int]


@dataclass
class Sample:
    """One sampled response and what became of it."""

    prompt: Prompt
    request: Request
    completion: Completion
    text: str
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    masked: bool = False
    """Left out of the policy's loss (rl.truncated = mask, or an empty response)."""
    live: bool = True
    """Its group has an advantage to learn from."""


@dataclass
class Rollout:
    """The samples of one step, ``samples_per_prompt`` after one another for each prompt."""

    samples: list[Sample]
    stats: SpecStats
    rollout_s: float
    score_s: float
    failed_scores: int
    live_groups: int
    num_groups: int
    skipped_prompts: int

    def metrics(self) -> dict[str, float]:
        """Rows of ``metrics.jsonl`` that the rollout decides (DESIGN section 10)."""
        rewards = torch.tensor([s.reward for s in self.samples], dtype=torch.float64)
        lengths = [len(s.completion.token_ids) for s in self.samples]
        result = {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std(unbiased=False).item(),
            "rollout/prompts": self.num_groups,
            "rollout/length_mean": sum(lengths) / len(lengths),
            "rollout/length_max": max(lengths),
            "rollout/truncated_fraction": sum(s.completion.finish_reason == "length" for s in self.samples)
            / len(lengths),
            "rollout/tokens": sum(lengths),
            "rollout/tokens_per_s": sum(lengths) / max(self.rollout_s, 1e-9),
            "score/failed": self.failed_scores,
            "skipped/groups": self.num_groups - self.live_groups,
            "skipped/prompts": self.skipped_prompts,
            "time/rollout": self.rollout_s,
            "time/score": self.score_s,
        }
        for name in sorted({key for s in self.samples for key in s.components}):
            values = [s.components[name] for s in self.samples if name in s.components]
            result[f"reward/{name}"] = sum(values) / len(values)
        return result | spec_metrics(self.stats)


def sum_stats(stats: list[SpecStats]) -> SpecStats:
    """The counts of several engines together."""
    positions = max((len(s.accepted_per_pos) for s in stats), default=0)
    return SpecStats(
        drafts=sum(s.drafts for s in stats),
        draft_tokens=sum(s.draft_tokens for s in stats),
        accepted=sum(s.accepted for s in stats),
        accepted_per_pos=[sum(s.accepted_per_pos[i] for s in stats if s.accepted_per_pos) for i in range(positions)],
    )


def spec_metrics(stats: SpecStats) -> dict[str, float]:
    """``spec/*`` of a span of serving; empty when nothing was drafted."""
    if not stats.drafts:
        return {}
    result = {
        "spec/accept_len": 1.0 + stats.accepted / stats.drafts,
        "spec/accept_rate": stats.accepted / max(1, stats.draft_tokens),
    }
    for i, count in enumerate(stats.accepted_per_pos):
        result[f"spec/accept_rate_pos_{i}"] = count / stats.drafts
    return result


class PromptStream:
    """Training prompts in order; ``cursor`` is all of its state.

    A prompt that leaves no room for a response is passed over and counted.
    """

    def __init__(self, environment: Environment, tokenizer: Any, system_prompt: str, longest_prompt: int) -> None:
        self.environment = environment
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.longest_prompt = longest_prompt
        self.cursor = 0
        self.skipped = 0

    def encode(self, index: int, split: str) -> Prompt:
        """Item ``index`` of ``split`` ("train" or "eval") with its token ids."""
        item = self.environment.item(index, split)
        return Prompt(index, item, encode_prompt(self.tokenizer, item, self.system_prompt))

    def next(self) -> Prompt:
        """The next training prompt that fits.

        Raises:
            RunError: a thousand prompts in a row did not fit.
        """
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            prompt = self.encode(self.cursor, "train")
            self.cursor += 1
            if len(prompt.token_ids) <= self.longest_prompt:
                return prompt
            self.skipped += 1
        raise RunError(
            f"{MAX_SKIPPED_IN_A_ROW} prompts in a row were longer than {self.longest_prompt} tokens, the room that "
            "rollout.max_model_len leaves beside rollout.sampling.max_tokens; raise the first or lower the second."
        )

    def held_out(self, config: Config, sampling: SamplingConfig) -> tuple[list[Prompt], list[list[int]]]:
        """The held-out prompts that fit, and a seed for each: the same at every evaluation.

        Raises:
            RunError: none fits.
        """
        count = min(config.eval.items, config.environment.eval_items)
        room = prompt_room(config, sampling)
        found = [(self.encode(i, "eval"), seeds) for i, seeds in enumerate(eval_seeds(config.seed, count))]
        fitting = [(prompt, seeds) for prompt, seeds in found if len(prompt.token_ids) <= room]
        if not fitting:
            raise RunError(
                f"All {count} held-out prompts are longer than {room} tokens, the room that rollout.max_model_len "
                "leaves beside eval.sampling.max_tokens; raise the first or lower the second."
            )
        return [prompt for prompt, _ in fitting], [seeds for _, seeds in fitting]


def prompt_room(config: Config, sampling: SamplingConfig) -> int:
    """Tokens of the longest prompt that leaves room for the longest response and the draft's lookahead."""
    return config.rollout.max_model_len - sampling.max_tokens - config.rollout.num_speculative_tokens - 1


def resolve_sampling(config: Config, sampling: SamplingConfig, tokenizer: Any, policy_path: str) -> SamplingConfig:
    """A copy of ``sampling`` with its length and every stop token: the config's, the tokenizer's, the model's.

    Raises:
        ConfigError: a stop token of the config that the tokenizer does not have.
    """
    training = config.rollout.sampling
    own = {*training.stop_token_ids, *sampling.stop_token_ids}
    if own and max(own) >= len(tokenizer):
        raise ConfigError(f"stop_token_ids has {max(own)}, and the tokenizer's ids end at {len(tokenizer) - 1}.")
    stops = {*own, *stop_token_ids(tokenizer, policy_path)}
    return dataclasses.replace(
        sampling, stop_token_ids=tuple(sorted(stops)), max_tokens=sampling.max_tokens or training.max_tokens
    )


def sample_responses(
    engine: Engine,
    tokenizer: Any,
    prompts: list[Prompt],
    seeds: list[list[int]],
    sampling: SamplingConfig,
    *,
    deadline_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> tuple[list[Sample], SpecStats, float]:
    """Draw one response per prompt and seed; returns the samples, the speculation statistics and the seconds."""
    before, started = engine.spec_stats(), time.perf_counter()
    requests = [Request(prompt.token_ids, seed) for prompt, row in zip(prompts, seeds) for seed in row]
    owners = [prompt for prompt, row in zip(prompts, seeds) for _ in row]
    completions = engine.generate(
        requests, sampling, deadline_s=deadline_s, should_stop=should_stop, on_progress=on_progress
    )
    samples = [
        Sample(prompt, request, completion, decode_response(tokenizer, completion.token_ids))
        for prompt, request, completion in zip(owners, requests, completions)
    ]
    return samples, engine.spec_stats() - before, time.perf_counter() - started


def score_samples(environment: Environment, samples: list[Sample], timeout_s: float, max_failed_share: float) -> int:
    """Fill in reward and components; returns how many scorer calls failed (they count as reward 0)."""
    batch = score_all(
        environment,
        [(s.prompt.item, s.text) for s in samples],
        timeout_s=timeout_s,
        max_failed_share=max_failed_share,
    )
    for sample, reward, components in zip(samples, batch.rewards, batch.components):
        sample.reward, sample.components = reward, components
    return batch.failed


def assign_advantages(samples: list[Sample], rl: RLConfig) -> int:
    """Compare each group's rewards; returns the number of groups with something to learn from."""
    for sample in samples:
        cut = sample.completion.finish_reason == "length"
        if cut and rl.truncated == "zero_reward":
            sample.reward = 0.0
        sample.masked = not sample.completion.token_ids or (cut and rl.truncated == "mask")
    shape = (-1, rl.samples_per_prompt)
    rewards_PS = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(shape)
    valid_PS = torch.tensor([not s.masked for s in samples]).view(shape)
    advantage_PS, live_P = advantages(rewards_PS, rl.advantage, valid_PS)
    for i, sample in enumerate(samples):
        sample.advantage = advantage_PS.view(-1)[i].item()
        sample.live = bool(live_P[i // rl.samples_per_prompt])
    return int(live_P.sum())


def step_seeds(run_seed: int, step: int, num_prompts: int, num_samples: int) -> list[list[int]]:
    """Seed of every request of a training step; they follow from the step alone, so a resumed run draws the same."""
    return [[request_seed(run_seed, step, p, s) for s in range(num_samples)] for p in range(num_prompts)]


def eval_seeds(run_seed: int, num_prompts: int) -> list[list[int]]:
    """Seed of every evaluation request, the same at every evaluation (training steps count from 1)."""
    return [[request_seed(run_seed, 0, p, 0)] for p in range(num_prompts)]


def sample_row(sample: Sample) -> dict[str, Any]:
    """One line of ``samples.jsonl``."""
    completion, prompt = sample.completion, sample.prompt.item.prompt
    return {
        "prompt": prompt,
        "response": sample.text,
        "answer": sample.prompt.item.answer,
        "reward": sample.reward,
        "components": sample.components,
        "advantage": sample.advantage,
        "finish_reason": completion.finish_reason,
        "seed": sample.request.seed,
        "drafts": completion.num_drafts,
        "accepted": completion.num_accepted,
    }
