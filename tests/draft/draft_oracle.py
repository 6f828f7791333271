"""An EAGLE-3 unroll written a second time, densely and without the package's modules: the tests' oracle.

It reads the draft's tensors by their checkpoint names, and gets rows, rope positions and 0/1 masks from the
caller.

Legend: T tokens, E hidden, H query heads, G key/value heads, D head dim, K passes.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from torchspec.draft.config import DraftConfig
from torchspec.draft.eagle3 import Eagle3Draft


def policy_shape(**changes) -> SimpleNamespace:
    """A tiny policy's numbers; grouped-query ratio 3."""
    numbers = dict(
        hidden_size=12,
        num_layers=6,
        num_heads=3,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=10,
        vocab_size=11,
        rope_theta=100.0,
        rope_scaling=None,
        norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architecture="qwen3",
    )
    return SimpleNamespace(**{**numbers, **changes})


def random_draft(seed: int = 0, *, dtype=torch.float64, shape=None, **config) -> Eagle3Draft:
    """A draft whose norms are random too (ones would hide a missing or misplaced norm)."""
    draft = Eagle3Draft.build(DraftConfig(**config), shape or policy_shape(), seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return draft


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x_THD: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    """Dimension i turns with dimension i + D/2 by position / theta^(2i/D), as complex numbers."""
    half = x_THD.shape[-1] // 2
    speed = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = positions_T.double()[:, None, None] * speed
    turned = torch.complex(x_THD[..., :half], x_THD[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def dense_unroll(
    tensors: dict[str, Tensor],
    first_T3E: Tensor,
    embeds_KTE: list[Tensor],
    positions_KT: list[Tensor],
    masks: list[Tensor],
    *,
    head_dim: int,
    theta: float,
    eps: float,
    norm_before_residual: bool = False,
) -> list[Tensor]:
    """K final-normed hidden states [T,E], fp64.

    Args:
        tensors: by checkpoint name, fp64.
        first_T3E: the taps side by side.
        embeds_KTE: input embedding rows of each pass.
        positions_KT: rope positions of each pass.
        masks: for pass k a 0/1 matrix [T, (k+1)*T]; column block j is the keys that pass j added.
    """
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    hidden, keys, values, outputs = first_T3E @ w["fc"].T, [], [], []
    for embed, positions, mask in zip(embeds_KTE, positions_KT, masks, strict=True):
        normed = rms_norm(hidden, w["hidden_norm"], eps)
        x = torch.cat((rms_norm(embed, w["input_layernorm"], eps), normed), dim=-1)
        q, k, v = ((x @ w[f"self_attn.{name}_proj"].T).reshape(len(x), -1, head_dim) for name in ("q", "k", "v"))
        group = q.shape[1] // k.shape[1]
        keys.append(rotate(k, positions, theta).repeat_interleave(group, dim=1))
        values.append(v.repeat_interleave(group, dim=1))
        scores = torch.einsum("thd,shd->hts", rotate(q, positions, theta), torch.cat(keys)) / math.sqrt(head_dim)
        weights = scores.masked_fill(mask == 0, -math.inf).softmax(-1)
        attended = torch.einsum("hts,shd->thd", weights, torch.cat(values)).flatten(1)
        residual = (normed if norm_before_residual else hidden) + attended @ w["self_attn.o_proj"].T
        x = rms_norm(residual, w["post_attention_layernorm"], eps)
        gate = x @ w["mlp.gate_proj"].T
        hidden = residual + (gate * gate.sigmoid() * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
        outputs.append(rms_norm(hidden, w["norm"], eps))
    return outputs


def unroll_rows(doc_lengths: list[int], passes: int) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    """For each pass: input row of every row (-1: none), rope positions and the mask, by plain loops."""
    total = sum(doc_lengths)
    sources, positions, masks = [], [], []
    for k in range(passes):
        source, position, mask = (
            [-1] * total,
            torch.zeros(total, dtype=torch.int64),
            torch.zeros(total, (k + 1) * total),
        )
        start = 0
        for length in doc_lengths:
            for t in range(length):
                row = start + t
                if t + 1 + k < length:
                    source[row] = row + 1 + k
                position[row] = t + k
                mask[row, start : row + 1] = 1
                for branch in range(1, k + 1):
                    mask[row, branch * total + row] = 1
            start += length
        sources.append(source)
        positions.append(position)
        masks.append(mask)
    return sources, positions, masks


def gather_rows(x_TE: Tensor, source: list[int]) -> Tensor:
    """Rows of x, zero where the source is -1."""
    return torch.stack([x_TE[i] if i >= 0 else torch.zeros_like(x_TE[0]) for i in source])
