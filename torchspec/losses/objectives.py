"""What a draft is asked to minimise at one row: value and gradient with respect to its logits, by hand.

Legend: b rows of a block, D draft vocabulary (this rank's slice under TP); y = logits / temperature, p and q
the teacher's and the student's probabilities over the draft vocabulary, alpha = sum_v min(p_v, q_v) their
overlap, which is the acceptance rate of speculative sampling; m = (p + q) / 2.

    forward_kl   soft cross-entropy, -sum p log q           dy = q - p
                 (forward KL plus the teacher's entropy, a constant)
    reverse_kl   KL(q || p)                                 dy = q (log q - log p - value)
    jsd          (KL(p || m) + KL(q || m)) / 2              dy = q (s - sum q s), s = log(q / m) / 2
    tv           1 - alpha = sum |p - q| / 2                dy = q (s - sum q s), s = sign(q - p) / 2
    lk           -log alpha                                 dy = dy(tv) / alpha
    lk_hybrid    w KL(p || q) + (1 - w) tv                  dy = w (q - p) + (1 - w) dy(tv)
                 w = exp(-3 alpha) held constant
    hard_ce      -log q[token that follows in the text]     dy = q - onehot

The two called lk are the "LK losses" of arXiv 2602.23881. A new objective is one function below, its line in
``OBJECTIVES``, its form in ``teacher_form`` and its definition in the tests' dense oracle.

Each function takes y (overwritten with dy) and the teacher's block and returns the values, [b]. Gradients are
those with respect to y; the caller divides by the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchspec.losses.logits import VocabComm, row_amax, row_dot

LK_HYBRID_ETA = 3.0  # the paper's best setting

# Objectives whose teacher block holds probabilities, and those that need their logarithms.
_FROM_PROBS = ("forward_kl", "tv")
_FROM_LOG_PROBS = ("reverse_kl", "jsd", "lk", "lk_hybrid")


def teacher_form(objective: str) -> str:
    """What the teacher's block must hold for this objective: "probs", "log_probs" or "none"."""
    if objective in _FROM_PROBS:
        return "probs"
    if objective in _FROM_LOG_PROBS:
        return "log_probs"
    if objective == "hard_ce":
        return "none"
    known = ", ".join(sorted(OBJECTIVES))
    raise ValueError(f"Distillation objective {objective!r} is unknown; choose one of {known}.")


def _exp_shifted_(y_bD: Tensor, top_b: Tensor, comm: VocabComm) -> tuple[Tensor, Tensor]:
    """y becomes exp(y - top); returns (its row sums over the whole vocabulary, the log-sum-exp)."""
    y_bD.sub_(top_b[:, None]).exp_()
    total_b = comm.sum(y_bD.sum(-1))
    return total_b, top_b + total_b.log()


def forward_kl(y_bD: Tensor, p_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    cross_b = comm.sum(row_dot(p_bD, y_bD))
    total_b, lse_b = _exp_shifted_(y_bD, top_b, comm)
    y_bD.mul_((1 / total_b)[:, None]).sub_(p_bD)
    return lse_b - cross_b


def _log_softmax_(y_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    """y becomes log q."""
    total_b = comm.sum((y_bD - top_b[:, None]).exp_().sum(-1))
    return y_bD.sub_((top_b + total_b.log())[:, None])


def reverse_kl(y_bD: Tensor, logp_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    _log_softmax_(y_bD, top_b, comm)
    q_bD = y_bD.exp()
    y_bD.sub_(logp_bD)
    value_b = comm.sum(row_dot(q_bD, y_bD))
    y_bD.sub_(value_b[:, None]).mul_(q_bD)
    return value_b


def jsd(y_bD: Tensor, logp_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    _log_softmax_(y_bD, top_b, comm)
    q_bD = y_bD.exp()
    logm_bD = torch.logaddexp(logp_bD, y_bD).sub_(math.log(2))
    y_bD.sub_(logm_bD)
    from_q_b = row_dot(q_bD, y_bD)
    p_bD = logp_bD.exp()
    logm_bD.neg_().add_(logp_bD)
    from_q_b, from_p_b = comm.sums(from_q_b, row_dot(p_bD, logm_bD))
    y_bD.sub_(from_q_b[:, None]).mul_(q_bD).mul_(0.5)
    return (from_p_b + from_q_b) / 2


def _from_sign_(q_bD: Tensor, sign_bD: Tensor, comm: VocabComm) -> Tensor:
    """q becomes the gradient of the total variation with respect to y, given sign(q - p)."""
    mean_b = comm.sum(row_dot(q_bD, sign_bD))
    return q_bD.mul_(sign_bD.sub_(mean_b[:, None])).mul_(0.5)


def total_variation(y_bD: Tensor, p_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    total_b, _ = _exp_shifted_(y_bD, top_b, comm)
    q_bD = y_bD.div_(total_b[:, None])
    gap_bD = q_bD - p_bD
    value_b = comm.sum(gap_bD.abs().sum(-1)) / 2
    _from_sign_(q_bD, gap_bD.sign_(), comm)
    return value_b


def _log_overlap(logq_bD: Tensor, logp_bD: Tensor, comm: VocabComm) -> Tensor:
    """log alpha, from logarithms: it stays finite where alpha itself underflows."""
    low_bD = torch.minimum(logq_bD, logp_bD)
    peak_b = comm.max(row_amax(low_bD))
    return peak_b + comm.sum(low_bD.sub_(peak_b[:, None]).exp_().sum(-1)).log()


def lk(y_bD: Tensor, logp_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    logq_bD = _log_softmax_(y_bD, top_b, comm)
    log_alpha_b = _log_overlap(logq_bD, logp_bD, comm)
    # Weight of each token in alpha that comes from q (half of it at a tie): min(p, q) / alpha where q < p.
    below_bD = torch.sign(logp_bD - logq_bD).add_(1).mul_(0.5)
    part_bD = torch.where(below_bD > 0, logq_bD - log_alpha_b[:, None], -torch.inf).exp_().mul_(below_bD)
    share_b = comm.sum(part_bD.sum(-1))
    y_bD.exp_().mul_(share_b[:, None]).sub_(part_bD)
    return -log_alpha_b


def lk_hybrid(y_bD: Tensor, logp_bD: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    logq_bD = _log_softmax_(y_bD, top_b, comm)
    p_bD = logp_bD.exp()
    kl_b = row_dot(p_bD, logp_bD - logq_bD)
    q_bD = y_bD.exp_()
    gap_bD = q_bD - p_bD
    kl_b, tv_b = comm.sums(kl_b, gap_bD.abs().sum(-1) / 2)
    weight_b = torch.exp(-LK_HYBRID_ETA * (1 - tv_b))
    sign_bD = gap_bD.sign()
    _from_sign_(q_bD, sign_bD, comm)
    q_bD.mul_((1 - weight_b)[:, None]).addcmul_(gap_bD, weight_b[:, None].expand_as(gap_bD))
    return weight_b * kl_b + (1 - weight_b) * tv_b


def hard_ce(y_bD: Tensor, target_b: Tensor, top_b: Tensor, comm: VocabComm) -> Tensor:
    """``target_b`` holds global draft ids, -1 where the token has none: such rows give value 0 and gradient
    0.
    """
    inside_b = target_b >= 0
    target_b = target_b.clamp_min(0)
    picked_b = comm.pick(y_bD, torch.arange(target_b.numel(), device=target_b.device), target_b, head=1)
    total_b, lse_b = _exp_shifted_(y_bD, top_b, comm)
    y_bD.mul_((inside_b / total_b)[:, None])
    local_b = target_b - comm.offsets[1]
    mine_b = inside_b & (local_b >= 0) & (local_b < y_bD.shape[1])
    if y_bD.shape[1]:
        y_bD.scatter_add_(1, local_b.clamp(0, y_bD.shape[1] - 1)[:, None], -mine_b[:, None].to(y_bD.dtype))
    return torch.where(inside_b, lse_b - picked_b, 0)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Tensor, VocabComm], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": total_variation,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
    "hard_ce": hard_ce,
}
