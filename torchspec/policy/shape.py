"""The numbers that define a policy, and their Hugging Face spelling (config.json). Needs neither torch nor torchtitan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec.errors import ConfigError
from torchspec.policy.config import PolicyConfig

HF_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# config.json entries that change the computation, and the only value of each that is implemented.
FIXED_ENTRIES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, 1),
}


@dataclass(frozen=True)
class PolicyShape:
    """Sizes and options of a dense decoder.

    Attributes: see ``PolicyConfig``; ``rope_scaling`` is Hugging Face's entry without rope_theta ({"rope_type": ...}), or
    None for plain RoPE.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"The policy's {name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"The policy's num_kv_heads ({self.num_kv_heads}) must divide its num_heads ({self.num_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(f"The policy's head_dim is {self.head_dim}; rotary embedding needs an even one.")

    @classmethod
    def from_config(cls, config: PolicyConfig, vocab_size: int) -> PolicyShape:
        """Shape of a policy built from scratch; ``vocab_size`` is the tokenizer's, used where the config says 0."""
        if config.vocab_size and config.vocab_size < vocab_size:
            raise ConfigError(
                f"policy.vocab_size = {config.vocab_size} is less than the tokenizer's {vocab_size} tokens; use 0 for those."
            )
        return cls(
            architecture=config.architecture,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size or vocab_size,
            rope_theta=config.rope_theta,
            rope_scaling=None,
            norm_eps=config.norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> PolicyShape:
        """Shape in a Hugging Face folder's config.json.

        Raises:
            ConfigError: no such file, an architecture or option that is not supported, a missing entry.
        """
        from torchspec.rope import check_rope_scaling

        path = Path(folder) / "config.json"
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"policy.path = '{folder}': its config.json cannot be read ({error}).") from error
        names = entries.get("architectures") or []
        kinds = [kind for kind, name in HF_ARCHITECTURES.items() if name in names]
        if not kinds:
            raise ConfigError(
                f"{path} names the architectures {names}; supported are {', '.join(HF_ARCHITECTURES.values())}."
            )
        for name, allowed in FIXED_ENTRIES.items():
            if entries.get(name, allowed[0]) not in allowed:
                raise ConfigError(f"{path} has {name} = {entries[name]!r}; only {allowed[0]!r} is supported.")
        rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
        try:
            heads = entries["num_attention_heads"]
            return cls(
                architecture=kinds[0],
                hidden_size=entries["hidden_size"],
                num_layers=entries["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=entries.get("num_key_value_heads") or heads,
                head_dim=entries.get("head_dim") or (128 if kinds[0] == "qwen3" else entries["hidden_size"] // heads),
                intermediate_size=entries["intermediate_size"],
                vocab_size=entries["vocab_size"],
                rope_theta=float(rope.get("rope_theta") or entries.get("rope_theta") or 10000.0),
                rope_scaling=check_rope_scaling(rope),
                norm_eps=entries.get("rms_norm_eps", 1e-6),
                max_position_embeddings=entries.get("max_position_embeddings", 2048),
                tie_word_embeddings=bool(entries.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ConfigError(f"{path} has no entry {error}.") from error

    def to_hf(self) -> dict[str, Any]:
        """config.json of this policy, as transformers and vLLM read it."""
        return {
            "architectures": [HF_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
        }
