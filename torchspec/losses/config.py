"""Settings of the policy-gradient loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class RLConfig:
    """GRPO and its common variants.

    The batch algebra: a step samples prompts_per_step x samples_per_prompt sequences. Their groups are split into
    updates_per_rollout parts, one optimizer step each. The sequences of a part are packed by tokens into microbatches
    of at most train.tokens_per_microbatch; gradients accumulate over the microbatches and are normalised once, by the
    whole part's count. A sequence that could not fit a microbatch is refused at start.
    """

    prompts_per_step: int = 16
    """Prompts (groups) in one rollout."""
    samples_per_prompt: int = 8
    """Sampled responses of each prompt; a group's advantage compares them."""
    updates_per_rollout: int = 1
    """Optimizer steps on one rollout. With 1 the ratio's old log-probabilities are the new ones, detached; with more,
    one no-grad pass makes them first."""
    advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
    """(r - mean)/std of the group, r - mean, or r minus the mean of the others."""
    loss_norm: Literal["token", "sequence", "constant"] = "token"
    """Divide by the step's trained tokens; average each sequence first; or divide by sequences x loss_norm_constant."""
    loss_norm_constant: int = 0
    """Tokens a sequence counts for with loss_norm = constant; 0 takes rollout.max_tokens."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token (PPO, GRPO) or per sequence as the geometric mean (GSPO)."""
    clip_low: float = 0.2
    """Lower clip: the ratio's floor is 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: the ratio's ceiling is 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the k3 KL estimate to the starting policy; 0 keeps no reference copy."""
    tis_cap: float = 2.0
    """Cap of the engine-trainer correction w = exp(lp_trainer_old - lp_engine); 0 turns the correction off."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """Above the cap: use the cap, or drop the token (or sequence)."""
    tis_level: Literal["token", "sequence"] = "token"
    """Correct each token by its own mismatch, or all of a sequence by their product."""
    truncated: Literal["train", "mask", "zero_reward"] = "train"
    """Responses cut at max_tokens: train as they are, leave out of the loss, or give reward 0."""
