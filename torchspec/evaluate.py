"""``torchspec eval``: serve a policy, with its draft or alone, on held-out items; reward, acceptance, tokens per
second."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from torchspec.collect import PromptStream, resolve_sampling, sample_responses, score_samples, spec_metrics
from torchspec.config import Config
from torchspec.data.environments import build_environment
from torchspec.data.tokenizer import load_tokenizer
from torchspec.draft.base import load_draft_class
from torchspec.validation import on_gpu


def evaluate(config: Config, policy: str, draft: str = "") -> dict[str, float]:
    """Serve the Hugging Face folders ``policy`` and ``draft`` ("" for none) and print one table; returns its numbers.

    Items, seeds and sampling are those of the training run's own evaluations.
    """
    from torchspec.rollout.vllm import VllmEngine

    environment = build_environment(config.environment, seed=config.seed)
    tokenizer = load_tokenizer(config.environment, policy)
    sampling = resolve_sampling(config, config.eval.sampling, tokenizer, policy)
    prompts = PromptStream(environment, tokenizer, config.environment.system_prompt, config.rollout.max_model_len)
    chosen, seeds = prompts.held_out(config, sampling)
    engine = VllmEngine(
        Path(policy),
        Path(draft) if draft else None,
        config.rollout,
        draft_method=load_draft_class(config.draft.algorithm).vllm_method if draft else None,
        seed=config.seed,
        device="cuda" if on_gpu(config) else "cpu",
    )
    try:
        samples, stats, seconds = sample_responses(
            engine, tokenizer, chosen, seeds, sampling, deadline_s=config.rollout.deadline_s
        )
    finally:
        engine.close()
    failed = score_samples(
        environment, samples, config.environment.scorer_timeout_s, config.environment.max_failed_share
    )
    tokens = sum(len(s.completion.token_ids) for s in samples)
    result = {
        "items": len(samples),
        "reward": sum(s.reward for s in samples) / len(samples),
        "failed scores": failed,
        "tokens": tokens,
        "seconds": seconds,
        "tokens/s": tokens / seconds,
    } | {name.removeprefix("spec/"): value for name, value in spec_metrics(stats).items()}
    table = Table("", "value", title=f"{policy} {'with ' + draft if draft else 'without a draft'}")
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return result
