"""Trunk attention on a CPU: PyTorch's own flash kernel, tile by tile.

Legend: T query rows, S key rows, H query heads, G key/value heads, D head dim.

``aten::_scaled_dot_product_flash_attention_for_cpu`` (read in torch 2.13) takes fp64/fp32/bf16/fp16, keeps
grouped heads un-expanded, returns the log-sum-exp and accepts a *joint* (out, lse) in its backward.  Three
traps shape this file: its causal mask is top-left, so a chunk that sees a prefix is split into a full
rectangle and a causal square; an empty query or key range kills the process; and a row whose keys are all
masked returns lse 0 instead of -inf, so tiles are cut such that every row of a tile sees a key.  Pieces of
bf16 inputs are computed in fp32 and stay so until they are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec.attention.merge import accumulation_dtype, merge
from torchspec.attention.view import Segment, TrunkView, segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

WINDOW_BLOCK = 128
"""Queries of one tile of sliding-window attention; its mask is [128, 127 + window]."""


@dataclass(frozen=True)
class Tile:
    """Rows q0:q1 against keys k0:k1: ``causal`` square, or full, or an additive ``mask`` [q1-q0, k1-k0] (bool
    here).
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    visible: Tensor | None = None
    first: bool = False
    """No earlier tile of this call has written these query rows."""


def _window_tiles(s: Segment, window: int) -> list[Tile]:
    """Blocks of queries against the keys that their windows reach; rows without any key are left out."""
    tiles = []
    k_end = s.k_pos + s.k_len
    lowest, highest = max(s.q_pos, s.k_pos), min(s.q_pos + s.q_len, k_end + window - 1)
    for a in range(lowest, highest, WINDOW_BLOCK):
        b = min(a + WINDOW_BLOCK, highest)
        lo, hi = max(s.k_pos, a - window + 1), min(k_end, b)
        distance = torch.arange(a, b).unsqueeze(1) - torch.arange(lo, hi)
        visible = (distance >= 0) & (distance < window)
        rows, keys = s.q_row - s.q_pos, s.k_row - s.k_pos
        tiles.append(Tile(a + rows, b + rows, lo + keys, hi + keys, visible=visible))
    return tiles


def tiles_of(view: TrunkView, q_rows: int, k_rows: int) -> list[Tile]:
    """Cuts the visible rectangle of every segment into tiles that the kernel can run."""
    tiles: list[Tile] = []
    seen: set[int] = set()  # first query rows of the segments met so far: segments share all query rows or none
    windowed = 0 < view.window < view.max_seqlen
    for s in segments(view, q_rows, k_rows):
        if windowed:
            tiles += _window_tiles(s, view.window)
            continue
        q0, q1 = s.q_row, s.q_row + s.q_len
        prefix = min(s.q_pos - s.k_pos, s.k_len)
        if prefix > 0:
            tiles.append(Tile(q0, q1, s.k_row, s.k_row + prefix, first=q0 not in seen))
            seen.add(q0)
        if prefix < s.k_len:
            tiles.append(Tile(q0, q1, s.k_row + prefix, s.k_row + s.k_len, causal=True, first=q0 not in seen))
            seen.add(q0)
    return tiles


def _heads_first(x_THD: Tensor) -> Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)


def _rows_first(x_1HTD: Tensor) -> Tensor:
    return x_1HTD.squeeze(0).transpose(0, 1)


def _additive(tile: Tile, dtype: torch.dtype) -> Tensor | None:
    if tile.visible is None or bool(tile.visible.all()):
        return None
    return torch.zeros(tile.visible.shape, dtype=dtype).masked_fill_(~tile.visible, -torch.inf)


def trunk_forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, view: TrunkView, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the rows of ``view``: (out [T,H,D], lse [T,H]), both in the accumulation dtype.

    A row without a visible key (only possible for the shard of another rank) has out 0 and lse -inf.
    """
    dtype = accumulation_dtype(q_THD.dtype)
    q_THD, k_SGD, v_SGD = q_THD.to(dtype), k_SGD.to(dtype), v_SGD.to(dtype)
    out_THD = torch.zeros(q_THD.shape, dtype=dtype)
    lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=dtype)
    for tile in tiles_of(view, q_THD.shape[0], k_SGD.shape[0]):
        rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        o, lse = _forward(
            _heads_first(q_THD[rows]),
            _heads_first(k_SGD[keys]),
            _heads_first(v_SGD[keys]),
            0.0,
            tile.causal,
            attn_mask=_additive(tile, dtype),
            scale=scale,
        )
        o, lse = _rows_first(o), _rows_first(lse)
        if not tile.first:
            o, lse = merge(out_THD[rows], lse_TH[rows], o, lse)
        out_THD[rows], lse_TH[rows] = o, lse
    return out_THD, lse_TH


def trunk_backward(
    do_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    view: TrunkView,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the trunk's keys in the accumulation dtype, from the *joint* (out, lse)."""
    dtype = accumulation_dtype(q_THD.dtype)
    do_THD, q_THD, k_SGD, v_SGD, out_THD = (x.to(dtype) for x in (do_THD, q_THD, k_SGD, v_SGD, out_THD))
    dq_THD = torch.zeros(q_THD.shape, dtype=dtype)
    dk_SGD, dv_SGD = torch.zeros(k_SGD.shape, dtype=dtype), torch.zeros(v_SGD.shape, dtype=dtype)
    for tile in tiles_of(view, q_THD.shape[0], k_SGD.shape[0]):
        rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        dq, dk, dv = _backward(
            _heads_first(do_THD[rows]),
            _heads_first(q_THD[rows]),
            _heads_first(k_SGD[keys]),
            _heads_first(v_SGD[keys]),
            _heads_first(out_THD[rows]),
            _heads_first(lse_TH[rows]),
            0.0,
            tile.causal,
            attn_mask=_additive(tile, dtype),
            scale=scale,
        )
        dq_THD[rows] += _rows_first(dq)
        dk_SGD[keys] += _rows_first(dk)
        dv_SGD[keys] += _rows_first(dv)
    return dq_THD, dk_SGD, dv_SGD
