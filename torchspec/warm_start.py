"""Supervised warm start: cross-entropy on the environment's own answers, so that RL has a reward to climb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchspec.data.packing import Sequence
from torchspec.data.tokenizer import encode_response
from torchspec.errors import ConfigError, Interrupted
from torchspec.losses.logprob import token_logprobs
from torchspec.optim.config import OptimizerConfig
from torchspec.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from torchspec.trainer import CoTrainer

NUM_COUNTED_ITEMS = 512


def _supervised_sequence(trainer: CoTrainer, prompt: Any) -> Sequence:
    """Prompt and reference answer, ended as the policy must end its own responses."""
    if prompt.item.answer is None:
        raise ConfigError(
            f"warm_start.steps = {trainer.config.warm_start.steps} needs reference answers, but item {prompt.index} of "
            f"{trainer.config.environment.name} has none; set warm_start.steps = 0."
        )
    answer = encode_response(trainer.tokenizer, prompt.item.answer)
    return Sequence(prompt_ids=prompt.token_ids, response_ids=answer[: trainer.sampling.max_tokens])


def warm_start(trainer: CoTrainer) -> None:
    """Run ``warm_start.steps`` supervised steps on fresh training items (RL goes on with the items after them).

    Raises:
        Interrupted: a signal came; nothing of a warm start is kept.
    """
    config = trainer.config.warm_start
    if not config.steps:
        return
    ranks, runner = trainer.ranks, trainer.runner
    settings = OptimizerConfig(lr=config.lr, warmup_steps=min(10, config.steps // 10), decay="cosine")
    optimizer = Optimizer(trainer.policy.hf_parameters(), settings, config.steps, runner.total_norm)
    for step in range(config.steps):
        if ranks.any(bool(trainer.stop)):
            raise Interrupted(f"Stopped by {trainer.stop.signal} in the warm start; run the same command again.")
        sequences = [_supervised_sequence(trainer, trainer.prompts.next()) for _ in range(config.batch_size)]
        batches = [m.batch for m in trainer.learner.packer.microbatches(sequences)]
        count = sum(len(s.response_ids) for s in sequences)
        losses: list[torch.Tensor] = []

        def loss(
            m: int, hidden_TE: torch.Tensor, batches: list = batches, count: int = count, losses: list = losses
        ) -> Any:
            batch = batches[m]
            targets_T = batch.targets_T.where(batch.mask_T, -1)
            logp_T, _ = token_logprobs(hidden_TE, trainer.policy.head_weight, targets_T)
            losses.append(-(logp_T * batch.mask_T).sum() / count)
            return losses[-1]

        if batches:
            runner.run(batches, on_hidden=loss, backward=True)
        ranks.sum_gradients(trainer.policy)
        runner.sum_tied_gradients()
        optimizer.clip()
        optimizer.step()
        total = sum(ranks.gather(sum(loss.item() for loss in losses)))
        trainer.live.phase("warm start", step + 1, config.steps, detail=f"loss {total:.3f}")


def token_counts(trainer: CoTrainer) -> torch.Tensor:
    """How often each token occurs in prompts, and answers where there are any, of sample items, int64 [V]; picks the
    draft's vocabulary."""
    counts_V = torch.zeros(trainer.policy.shape.vocab_size, dtype=torch.int64)
    for index in range(min(NUM_COUNTED_ITEMS, max(64, trainer.config.warm_start.batch_size))):
        prompt = trainer.prompts.encode(index, "train")
        answer = prompt.item.answer
        answer_ids = [] if answer is None else encode_response(trainer.tokenizer, answer)[: trainer.sampling.max_tokens]
        ids = torch.tensor([*prompt.token_ids, *answer_ids])
        counts_V += torch.bincount(ids, minlength=counts_V.numel())
    return counts_V
