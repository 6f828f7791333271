"""Dense branch attention by plain autograd: the slow, obvious reference that every kernel is tested against.

Legend: T rows of the pack, H query heads, G key/value heads, D head dim.

The mask of two documents of 3 and 2 tokens in pass k = 2 (rows: queries; columns: trunk keys of all rows,
then for each branch pass the keys of all rows)::

         trunk        pass 1       pass 2
       a b c d e    a b c d e    a b c d e
    a  1 0 0 0 0    1 0 0 0 0    1 0 0 0 0
    b  1 1 0 0 0    0 1 0 0 0    0 1 0 0 0
    c  1 1 1 0 0    0 0 1 0 0    0 0 1 0 0
    d  0 0 0 1 0    0 0 0 1 0    0 0 0 1 0
    e  0 0 0 1 1    0 0 0 0 1    0 0 0 0 1
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_mask(cu_seqlens: Tensor, num_branches: int, window: int = 0) -> Tensor:
    """bool [T, T * (1 + num_branches)]: the picture above; ``window`` counts trunk keys incl. self."""
    cu = cu_seqlens.tolist()
    row = torch.arange(cu[-1])
    document = torch.bucketize(row, torch.tensor(cu[1:]), right=True)
    distance = row.unsqueeze(1) - row
    trunk = (document.unsqueeze(1) == document) & (distance >= 0)
    if window > 0:
        trunk &= distance < window
    return torch.cat([trunk, *[distance == 0] * num_branches], dim=1)


def dense_branch_attention(
    q_THD: Tensor,
    k0_TGD: Tensor,
    v0_TGD: Tensor,
    kb: list[Tensor],
    vb: list[Tensor],
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as ``branch_attention``, in q's dtype; ``max_seqlen`` is unused."""
    repeats = q_THD.shape[1] // k0_TGD.shape[1]
    k_SHD = torch.cat([k0_TGD, *kb]).repeat_interleave(repeats, dim=1)
    v_SHD = torch.cat([v0_TGD, *vb]).repeat_interleave(repeats, dim=1)
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * scale
    scores_HTS = scores_HTS.masked_fill(~dense_mask(cu_seqlens, len(kb), window), -torch.inf)
    out_THD = torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v_SHD)
    return out_THD, scores_HTS.logsumexp(-1).transpose(0, 1)


class DenseTrunk:
    """``torchspec.context_parallel.trunk.Trunk`` on one rank, by the oracle; ``layout`` is a PackedZigzag."""

    def __init__(self, layout, window: int = 0):
        self.layout, self.window = layout, window
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Adds this pass's keys and values, then attends: [T, H, D]."""
        self.keys.append(k_TGD)
        self.values.append(v_TGD)
        (k0, *kb), (v0, *vb), layout = self.keys, self.values, self.layout
        scale = q_THD.shape[-1] ** -0.5
        return dense_branch_attention(q_THD, k0, v0, kb, vb, layout.cu_seqlens, layout.max_seqlen, scale, self.window)[
            0
        ]
