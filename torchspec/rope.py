"""Rotary position embedding of the policy and of drafts, with the rope scalings that vLLM serves.

The layout is "neox" (Hugging Face): dimension i rotates together with dimension i + D/2. Frequencies are made
in fp32 by the same formulas as vLLM and transformers, so that the trained draft and the served draft agree at
long positions too (an fp64 table rounded to fp32 differs by 1e-7 relative, which is 1e-2 radians at position
100k). In fp64 everything is fp64.

Legend: T tokens, H heads (query or key/value), D head dim, F = D/2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchspec.errors import ConfigError

ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    # rope type -> (keys that it needs, keys that it may have)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
    ),
}
"""Rope types that a draft can be trained and served with."""


def check_rope_scaling(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the scaling in one spelling ('rope_type' and its own keys), or None for plain RoPE.

    Args:
        scaling: Hugging Face's rope_scaling or rope_parameters entry; 'type' is accepted for 'rope_type', and
            a 'rope_theta' inside it is dropped (the caller reads it apart).

    Raises:
        ConfigError: a type or key that this module cannot reproduce.
    """
    if not scaling:
        return None
    entries = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type")}
    rope_type = entries.pop("rope_type", scaling.get("type", "default"))
    if entries.get("partial_rotary_factor", 1.0) == 1.0:
        entries.pop("partial_rotary_factor", None)
    if rope_type not in ROPE_KEYS:
        raise ConfigError(f"Rope scaling {rope_type!r} is not supported; supported are {', '.join(ROPE_KEYS)}.")
    needed, optional = ROPE_KEYS[rope_type]
    entries = {key: value for key, value in entries.items() if value is not None}
    if missing := sorted(needed - set(entries)):
        raise ConfigError(f"Rope scaling {rope_type!r} lacks {', '.join(missing)}.")
    if unknown := sorted(set(entries) - needed - optional):
        raise ConfigError(f"Rope scaling {rope_type!r} has entries that are not implemented: {', '.join(unknown)}.")
    return None if rope_type == "default" else {"rope_type": rope_type, **entries}


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: dict[str, Any] | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, float]:
    """Inverse frequencies [F] of the rotation and the factor on cos and sin (1 except for yarn).

    Args:
        head_dim: D, even.
        theta: base of the rotation.
        scaling: what check_rope_scaling returned.
        dtype: torch.float32 or torch.float64.
        device: where the frequencies are made.
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    inverse_F = 1.0 / (theta**exponent_F)
    if scaling is None:
        return inverse_F, 1.0
    kind, factor = scaling["rope_type"], float(scaling["factor"])
    if kind == "linear":
        return inverse_F / factor, 1.0
    if kind == "llama3":
        return _llama3(inverse_F, factor, scaling), 1.0
    return _yarn(inverse_F, head_dim, theta, factor, scaling)


def _llama3(inverse_F: Tensor, factor: float, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are divided by factor, short ones kept, those between blended."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength_F = 2 * math.pi / inverse_F
    smooth_F = (original / wavelength_F - low) / (high - low) if high != low else torch.zeros_like(inverse_F)
    blend_F = (1 - smooth_F) * inverse_F / factor + smooth_F * inverse_F
    long_F = torch.where(wavelength_F > original / low, inverse_F / factor, blend_F)
    return torch.where(wavelength_F < original / high, inverse_F, long_F)


def _yarn(
    inverse_F: Tensor, head_dim: int, theta: float, factor: float, scaling: dict[str, Any]
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, a linear ramp between them."""
    original = float(scaling["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.get("beta_fast", 32)), dimension_of(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    index_F = torch.arange(head_dim // 2, dtype=inverse_F.dtype, device=inverse_F.device)
    keep_F = 1 - ((index_F - low) / (high - low)).clamp(0, 1)
    mixed_F = (inverse_F / factor) * (1 - keep_F) + inverse_F * keep_F
    return mixed_F, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: dict[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(numerator) / magnitude(denominator)
    return magnitude(1.0)


def rope_tables(
    positions_T: Tensor, head_dim: int, theta: float, scaling: dict[str, Any] | None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos [T,F] and sin [T,F] at integer positions; fp64 when dtype is fp64, else fp32."""
    table_dtype = torch.promote_types(dtype, torch.float32)
    inverse_F, magnitude = rope_frequencies(head_dim, theta, scaling, dtype=table_dtype, device=positions_T.device)
    angle_TF = positions_T.to(table_dtype)[:, None] * inverse_F
    return angle_TF.cos() * magnitude, angle_TF.sin() * magnitude


def apply_rope(x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate heads by the tables of rope_tables; computed in their dtype, returned in x's."""
    first_THF, second_THF = x_THD.to(cos_TF.dtype).chunk(2, dim=-1)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    rotated_THD = torch.cat(
        (first_THF * cos_T1F - second_THF * sin_T1F, second_THF * cos_T1F + first_THF * sin_T1F), dim=-1
    )
    return rotated_THD.to(x_THD.dtype)
