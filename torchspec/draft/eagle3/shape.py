"""The numbers that define an EAGLE-3 draft, resolved from the [draft] table or from a checkpoint, and checked
against the policy.

vLLM inherits nothing from the policy for a draft: rope, context length, tap ids and vocabulary all have to be
right in the draft's own config.json, and a wrong one costs acceptance without an error. So each is resolved
here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchspec.errors import ConfigError
from torchspec.rope import check_rope_scaling

if TYPE_CHECKING:
    from torchspec.draft.config import DraftConfig
    from torchspec.policy.shape import PolicyShape


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes and options of a draft."""

    hidden_size: int
    """E, the policy's: taps, embedding rows and the draft's own hidden state have this width."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """V of the policy."""
    draft_vocab_size: int
    """Vd; equal to V when the draft speaks the policy's vocabulary."""
    tap_ids: tuple[int, ...]
    """Ascending; the columns of fc are in this order."""
    norm_before_residual: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "draft_vocab_size",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"The draft's {name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"The draft's num_kv_heads ({self.num_kv_heads}) does not divide its num_heads ({self.num_heads}); set "
                "draft.num_heads and draft.num_kv_heads together."
            )
        if self.hidden_size % self.num_heads:
            # transformers' LlamaConfig, which vLLM parses the draft with, refuses this whatever head_dim
            # says.
            raise ConfigError(
                f"The draft's num_heads ({self.num_heads}) does not divide the hidden size ({self.hidden_size}), and "
                "no server could load such a draft; set draft.num_heads (and draft.num_kv_heads) to a divisor."
            )
        if self.head_dim % 2:
            raise ConfigError(f"The draft's head_dim is {self.head_dim}; rotary embedding needs an even one.")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft.vocab_size is {self.draft_vocab_size}, more than the policy's {self.vocab_size}; "
                "use 0 for the policy's vocabulary, or a smaller number."
            )

    @property
    def has_draft_vocab(self) -> bool:
        """Whether d2t exists."""
        return self.draft_vocab_size != self.vocab_size


def default_tap_ids(num_layers: int) -> tuple[int, ...]:
    """(2, L//2, L-3), vLLM's choice, where these differ and ascend; else (1, L//2, L-1) without repetitions.

    Every id counts decoder layers already passed: L=32 gives (2, 16, 29), L=4 gives (1, 2, 3), L=2 gives
    (1,).
    """
    half = num_layers // 2
    if 2 < half < num_layers - 3:
        return (2, half, num_layers - 3)
    return tuple(sorted({1, half, num_layers - 1} - {0})) or (num_layers,)


def check_tap_ids(tap_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Tap ids as a tuple of ints, refused unless they ascend strictly within 0..num_layers.

    Raises:
        ConfigError: with the list and what would work.
    """
    ids = tuple(int(i) for i in tap_ids)
    rule = f"give ids from 0 (embeddings) to {num_layers} (after the last layer), ascending, none twice"
    if not ids:
        raise ConfigError(f"The draft has no tap ids; {rule}.")
    if bad := [i for i in ids if not 0 <= i <= num_layers]:
        raise ConfigError(
            f"draft.tap_ids {list(ids)} has {bad[0]}, which the policy's {num_layers} layers do not have; {rule}."
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"draft.tap_ids {list(ids)} names a tap twice; {rule}.")
    if list(ids) != sorted(ids):
        # vLLM sorts the list: columns of fc in any other order would be served permuted.
        raise ConfigError(f"draft.tap_ids {list(ids)} is not ascending; {rule}: {sorted(ids)}.")
    return ids


def shape_from_config(config: DraftConfig, policy: PolicyShape) -> Eagle3Shape:
    """The shape of a new draft: what [draft] leaves at 0 or empty is the policy's.

    Raises:
        ConfigError: a setting that cannot work, with its name.
    """
    tap_ids = config.tap_ids or default_tap_ids(policy.num_layers)
    return Eagle3Shape(
        hidden_size=policy.hidden_size,
        num_heads=config.num_heads or policy.num_heads,
        num_kv_heads=config.num_kv_heads or policy.num_kv_heads,
        head_dim=config.head_dim or policy.head_dim,
        intermediate_size=config.intermediate_size or policy.intermediate_size,
        vocab_size=policy.vocab_size,
        draft_vocab_size=config.vocab_size or policy.vocab_size,
        tap_ids=check_tap_ids(tap_ids, policy.num_layers),
        norm_before_residual=config.norm_before_residual,
        norm_eps=policy.norm_eps,
        rope_theta=float(policy.rope_theta),
        rope_scaling=check_rope_scaling(policy.rope_scaling),
        max_position_embeddings=policy.max_position_embeddings,
    )
