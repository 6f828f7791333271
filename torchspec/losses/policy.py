"""Advantages and the clipped policy-gradient loss: GRPO and its common variants.

Legend: T tokens of a pack, P groups (prompts), S samples of a group.

The old log-probabilities of the ratio are the trainer's own. What the engine reports differs a little from
them; that mismatch is corrected by a weight of its own (truncated importance sampling), never inside the
clipped ratio.

A microbatch holds whole sequences, so every sum below can be added over microbatches and ranks; the
normaliser counts the whole optimizer step and is passed in. Gradients of all microbatches then simply add up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchspec.losses.config import RLConfig


class PolicyCounts(NamedTuple):
    """What one optimizer step trains on, over all its microbatches and ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences with at least one trained token."""


class PolicyLossOutput(NamedTuple):
    loss: Tensor
    """Scalar; this microbatch's share of the step's loss."""
    sums: dict[str, Tensor]
    """Detached sums over trained tokens; add them over microbatches and ranks, then ``policy_metrics``."""
    maxima: dict[str, Tensor]
    """Detached maxima; take the maximum over microbatches and ranks."""


def advantages(rewards_PS: Tensor, kind: str, valid_PS: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Advantage of each sample within its group, and which groups have one.

    Args:
        rewards_PS: float rewards; fp64 is used inside.
        kind: "group_std" (r - mean) / std with the sample standard deviation (n - 1), "group_mean" r - mean,
            or "leave_one_out" r - mean of the others.
        valid_PS: bool; samples that may be compared (a masked truncated response may not). None: all.
    Returns:
        (adv_PS fp32, live_P bool). A group is dead, its advantages 0, when fewer than two samples are valid
        or all valid rewards agree to within rounding.
    Raises:
        ValueError: a reward of a valid sample that is not finite, or an unknown kind.
    """
    if rewards_PS.dim() != 2:
        raise ValueError(f"Rewards must be [groups, samples]; got shape {tuple(rewards_PS.shape)}.")
    valid = torch.ones_like(rewards_PS, dtype=torch.bool) if valid_PS is None else valid_PS.bool()
    bad = valid & ~torch.isfinite(rewards_PS)
    if bad.any():
        group, sample = bad.nonzero()[0].tolist()
        raise ValueError(
            f"The reward of sample {sample} in group {group} is {rewards_PS[group, sample].item()}; "
            "a scorer must return finite numbers."
        )
    r = torch.where(valid, rewards_PS.double(), 0.0)
    n = valid.sum(1, keepdim=True)
    mean = r.sum(1, keepdim=True) / n.clamp_min(1)
    centred = torch.where(valid, r - mean, 0.0)
    spread = torch.where(valid, r, -torch.inf).amax(1) - torch.where(valid, r, torch.inf).amin(1)
    # Equal rewards that were computed along different ways differ by rounding (fp32 at worst); a std of 1e-8
    # would blow them up to advantages of 1.
    live = (n[:, 0] >= 2) & (spread > 1e-6 * r.abs().amax(1).clamp_min(1e-6))
    if kind == "group_std":
        std = (centred.square().sum(1, keepdim=True) / (n - 1).clamp_min(1)).sqrt()
        adv = centred / torch.where(live[:, None], std, 1.0)
    elif kind == "group_mean":
        adv = centred
    elif kind == "leave_one_out":
        adv = centred * n / (n - 1).clamp_min(1)
    else:
        raise ValueError(f"Advantage kind {kind!r} is unknown; choose group_std, group_mean or leave_one_out.")
    return torch.where(live[:, None], adv, 0.0).float(), live


def policy_counts(mask_T: Tensor, seq_ids_T: Tensor) -> Tensor:
    """[2] fp64: trained tokens and sequences with one, of this microbatch. Sum over microbatches and
    ranks.
    """
    mask = mask_T.bool()
    per_seq = torch.zeros(mask.numel() + 1, device=mask.device).index_add_(0, _local_ids(seq_ids_T, mask), mask.float())
    return torch.stack([mask.sum().double(), (per_seq > 0).sum().double()])


def _local_ids(seq_ids_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sequence ids with untrained rows sent to the extra slot T."""
    return torch.where(mask_T, seq_ids_T, seq_ids_T.numel())


class _Segments:
    """Sums over the sequences of a pack, without leaving the device: one slot per possible id, and a spare
    one.
    """

    def __init__(self, seq_ids_T: Tensor, mask_T: Tensor, dtype: torch.dtype):
        self.ids = _local_ids(seq_ids_T, mask_T)
        self.dtype = dtype
        self.length_T = self.expand_sum(mask_T.to(dtype)).clamp_min(1)

    def expand_sum(self, x_T: Tensor) -> Tensor:
        """For every token, the sum of x over its sequence."""
        sums = torch.zeros(self.ids.numel() + 1, dtype=self.dtype, device=x_T.device).index_add(0, self.ids, x_T)
        return sums[self.ids]


def correction_weight(gap_T: Tensor, segments: _Segments, rl: RLConfig) -> tuple[Tensor, Tensor]:
    """Engine-trainer correction: (w_T detached, clipped_T bool); gap = trainer's old minus engine's
    log-probability.
    """
    if rl.tis_cap <= 0:
        return torch.ones_like(gap_T), torch.zeros_like(gap_T, dtype=torch.bool)
    x_T = segments.expand_sum(gap_T) if rl.tis_level == "sequence" else gap_T
    log_cap = math.log(rl.tis_cap)
    over_T = x_T > log_cap
    w_T = x_T.clamp_max(log_cap).exp()
    if rl.tis_mode == "mask":
        w_T = torch.where(over_T, 0.0, w_T)
    elif rl.tis_mode != "truncate":
        raise ValueError(f"rl.tis_mode is {rl.tis_mode!r}; choose truncate or mask.")
    return w_T, over_T


def _token_weight(segments: _Segments, mask_T: Tensor, rl: RLConfig, counts: PolicyCounts) -> Tensor:
    """Weight of each token in the step's loss; sums to 1 over the step (token, sequence)."""
    one_T = mask_T.to(segments.dtype)
    if rl.loss_norm == "token":
        return one_T / max(counts.tokens, 1)
    if rl.loss_norm == "sequence":
        return one_T / segments.length_T / max(counts.sequences, 1)
    if rl.loss_norm != "constant":
        raise ValueError(f"rl.loss_norm is {rl.loss_norm!r}; choose token, sequence or constant.")
    if rl.loss_norm_constant <= 0:
        raise ValueError(
            "rl.loss_norm_constant is 0: put the number of tokens in (rollout's max_tokens is the usual one) "
            "before the loss is computed."
        )
    return one_T / (max(counts.sequences, 1) * rl.loss_norm_constant)


def policy_loss(
    logp_new_T: Tensor,
    logp_old_T: Tensor,
    logp_engine_T: Tensor,
    adv_T: Tensor,
    mask_T: Tensor,
    seq_ids_T: Tensor,
    rl: RLConfig,
    counts: PolicyCounts,
    ref_logp_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> PolicyLossOutput:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef k3, normalised over the whole step.

    r = exp(new - old) per token, or per sequence its geometric mean exp(mean(new - old)) with the gradient
    through it (GSPO). w is the engine-trainer correction, a constant. k3 = exp(ref - new) - (ref - new) - 1.

    Args:
        logp_new_T: fp32 log-probabilities with gradient. The other log-probabilities are detached here.
        adv_T: advantage of the sequence, on each of its tokens.
        mask_T: trained tokens; what the other arguments hold elsewhere is never used, not even a NaN.
        seq_ids_T: int64, which sequence of this pack a row belongs to, in 0..T-1.
        counts: of the whole optimizer step (``policy_counts`` summed).
        ref_logp_T: reference log-probabilities; needed when rl.kl_coef is not 0.
        entropy_T: for the metrics only.
    """
    mask = mask_T.bool()
    dtype = torch.float64 if logp_new_T.dtype == torch.float64 else torch.float32

    def clean(x_T: Tensor) -> Tensor:
        # Rows outside the mask may hold -inf or NaN; 0 * NaN would reach the gradient, a selected 0 does not.
        return torch.where(mask, x_T.to(dtype), 0.0)

    new = clean(logp_new_T)
    old, engine, adv = clean(logp_old_T.detach()), clean(logp_engine_T.detach()), clean(adv_T.detach())
    segments = _Segments(seq_ids_T, mask, dtype)
    log_ratio = new - old
    if rl.ratio == "sequence":
        log_ratio = segments.expand_sum(log_ratio) / segments.length_T
    elif rl.ratio != "token":
        raise ValueError(f"rl.ratio is {rl.ratio!r}; choose token or sequence.")
    ratio = log_ratio.clamp_max(60.0).exp()  # exp(60) is far past every clip and finite in fp32
    clipped = ratio.clamp(1 - rl.clip_low, 1 + rl.clip_high)
    gain = torch.minimum(ratio * adv, clipped * adv)
    w, tis_over = correction_weight(old - engine, segments, rl)
    token_weight = _token_weight(segments, mask, rl, counts)
    per_token = -w * gain
    kl = None
    if ref_logp_T is not None:
        back = (clean(ref_logp_T.detach()) - new).clamp_max(60.0)
        kl = back.exp() - back - 1
        per_token = per_token + rl.kl_coef * kl
    elif rl.kl_coef:
        raise ValueError("rl.kl_coef is not 0 but no reference log-probabilities were given.")
    loss = (per_token * token_weight).sum()
    sums, maxima = _policy_sums(mask, ratio, adv, w, tis_over, old, engine, rl)
    sums["kl"] = kl.detach().mul(mask).double().sum() if kl is not None else torch.zeros_like(sums["tokens"])
    sums["entropy"] = (
        torch.where(mask, entropy_T.detach(), 0.0).double().sum()
        if entropy_T is not None
        else torch.zeros_like(sums["tokens"])
    )
    sums["loss"] = loss.detach().double()
    return PolicyLossOutput(loss, sums, maxima)


def _policy_sums(
    mask: Tensor,
    ratio: Tensor,
    adv: Tensor,
    w: Tensor,
    tis_over: Tensor,
    old: Tensor,
    engine: Tensor,
    rl: RLConfig,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def total(x: Tensor) -> Tensor:
        return torch.where(mask, x.detach().double(), 0.0).sum()

    gap = old - engine
    # Only where the clip cuts the gradient: the ratio has left the band on the side that the advantage pushes
    # it to.
    low = (ratio < 1 - rl.clip_low) & (adv < 0)
    high = (ratio > 1 + rl.clip_high) & (adv > 0)
    sums = {
        "tokens": mask.sum().double(),
        "ratio": total(ratio),
        "clip_low": total(low),
        "clip_high": total(high),
        "tis_clip": total(tis_over),
        "tis_weight": total(w),
        "advantage": total(adv),
        "advantage_square": total(adv.double().square()),
        "logprob_gap": total(gap.abs()),
        # k3 estimate of KL(engine || trainer) on the engine's own samples: never negative, low variance.
        "engine_kl": total(gap.double().clamp_max(60.0).exp() - gap.double() - 1),
    }
    return sums, {"logprob_gap": gap.abs().amax().double() if gap.numel() else sums["tokens"].clone()}


def policy_metrics(sums: dict[str, Tensor | float], maxima: dict[str, Tensor | float]) -> dict[str, float]:
    """The step's metrics under their names in metrics.jsonl, from sums and maxima over all microbatches and
    ranks.
    """
    s = {name: float(value) for name, value in sums.items()}
    n = max(s["tokens"], 1.0)
    variance = s["advantage_square"] / n - (s["advantage"] / n) ** 2
    return {
        "policy/loss": s["loss"],
        "policy/entropy": s["entropy"] / n,
        "policy/kl": s["kl"] / n,
        "policy/ratio_mean": s["ratio"] / n,
        "policy/clip_fraction": (s["clip_low"] + s["clip_high"]) / n,
        "policy/clip_low_fraction": s["clip_low"] / n,
        "policy/clip_high_fraction": s["clip_high"] / n,
        "policy/tis_clip_fraction": s["tis_clip"] / n,
        "policy/tis_weight_mean": s["tis_weight"] / n,
        "policy/advantage_std": math.sqrt(max(variance, 0.0)),
        "train/logprob_gap_mean": s["logprob_gap"] / n,
        "train/engine_kl": s["engine_kl"] / n,
        "train/logprob_gap": float(maxima["logprob_gap"]),
    }
