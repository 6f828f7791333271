"""Joining softmaxes by their log-sum-exp, and the branch part of branch attention.

Legend: T rows, H query heads, G key/value heads, R = H / G query heads of one group, D head dim.

Everything here is plain tensor arithmetic in the accumulation dtype (fp32, or fp64 for fp64 inputs): it runs
on every device, traces under ``torch.compile`` and costs O(T H D) per branch, nothing against the trunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out_a_THD: Tensor, lse_a_TH: Tensor, out_b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two softmaxes over disjoint keys; a row that saw no key has lse = -inf and counts for nothing.

    All four tensors have the accumulation dtype; so have the joined (out, lse).
    """
    lse_TH = torch.logaddexp(lse_a_TH, lse_b_TH)
    # -inf - -inf is NaN: a row that neither side has seen keeps weight 0
    base_TH = torch.where(lse_TH == -torch.inf, torch.zeros_like(lse_TH), lse_TH)
    a_TH1 = torch.exp(lse_a_TH - base_TH).unsqueeze(-1)
    b_TH1 = torch.exp(lse_b_TH - base_TH).unsqueeze(-1)
    return a_TH1 * out_a_THD + b_TH1 * out_b_THD, lse_TH


def _by_group(x_THD: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[T, H, ...] -> [T, G, R, ...] in ``dtype``; query head h belongs to group h // R."""
    return x_THD.to(dtype).unflatten(1, (groups, x_THD.shape[1] // groups))


def _scores(q_TGRD: Tensor, k_TGD: Tensor, scale: float) -> Tensor:
    """Score of each query head with the one branch key of its row: [T, G, R]."""
    return (q_TGRD * k_TGD.to(q_TGRD.dtype).unsqueeze(2)).sum(-1) * scale


def branch_forward(
    q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor, kb: list[Tensor], vb: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Adds the branch keys of each row to the trunk's softmax.

    Args: q [T,H,D]; out and lse of the trunk in the accumulation dtype; kb, vb: branch keys and values, each
    [T,G,D]. Returns the joint (out, lse) in the accumulation dtype.
    """
    if not kb:
        return out_THD, lse_TH
    dtype, groups = lse_TH.dtype, kb[0].shape[1]
    q_TGRD = _by_group(q_THD, groups, dtype)
    trunk_TGR = lse_TH.unflatten(1, q_TGRD.shape[1:3])
    scores = [_scores(q_TGRD, k_TGD, scale) for k_TGD in kb]
    lse_TGR = torch.logsumexp(torch.stack([trunk_TGR, *scores], -1), -1)
    joint_TGRD = torch.exp(trunk_TGR - lse_TGR).unsqueeze(-1) * _by_group(out_THD, groups, dtype)
    for score_TGR, v_TGD in zip(scores, vb):
        joint_TGRD = joint_TGRD + torch.exp(score_TGR - lse_TGR).unsqueeze(-1) * v_TGD.to(dtype).unsqueeze(2)
    return joint_TGRD.flatten(1, 2), lse_TGR.flatten(1, 2)


def branch_backward(
    do_THD: Tensor,
    dlse_TH: Tensor | None,
    q_THD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    kb: list[Tensor],
    vb: list[Tensor],
    scale: float,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Gradients of the branch part by hand, from the joint (out, lse).

    p_i = exp(s_i - lse); delta = do . out - dlse; dv_i = p_i do; ds_i = p_i (do . v_i - delta) scale; dq +=
    ds_i k_i; dk_i = ds_i q.  dk_i and dv_i are summed over the query heads of their group.  Returns (dq or
    None without a branch, dkb, dvb), all in the accumulation dtype.
    """
    if not kb:
        return None, [], []
    dtype, groups = lse_TH.dtype, kb[0].shape[1]
    q_TGRD, do_TGRD = _by_group(q_THD, groups, dtype), _by_group(do_THD, groups, dtype)
    delta_TGR = (do_TGRD * _by_group(out_THD, groups, dtype)).sum(-1)
    if dlse_TH is not None:
        delta_TGR = delta_TGR - _by_group(dlse_TH, groups, dtype)
    lse_TGR = lse_TH.unflatten(1, q_TGRD.shape[1:3])
    dq_TGRD, dkb, dvb = torch.zeros_like(q_TGRD), [], []
    for k_TGD, v_TGD in zip(kb, vb):
        p_TGR = torch.exp(_scores(q_TGRD, k_TGD, scale) - lse_TGR)
        dp_TGR = (do_TGRD * v_TGD.to(dtype).unsqueeze(2)).sum(-1)
        ds_TGR1 = (p_TGR * (dp_TGR - delta_TGR) * scale).unsqueeze(-1)
        dq_TGRD = dq_TGRD + ds_TGR1 * k_TGD.to(dtype).unsqueeze(2)
        dkb.append((ds_TGR1 * q_TGRD).sum(2))
        dvb.append((p_TGR.unsqueeze(-1) * do_TGRD).sum(2))
    return dq_TGRD.flatten(1, 2), dkb, dvb
