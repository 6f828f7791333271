"""The numbers that define a policy, whatever they come from: the [policy] table or a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchspec.errors import ConfigError
from torchspec.policy.config import PolicyConfig
from torchspec.rope import ROPE_KEYS, check_rope_scaling

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""model_type in config.json -> its entry in ``architectures``."""

# config.json entry -> the value under which it does nothing; another value is a feature that torchtitan's
# dense Qwen3 and Llama do not have, and training without it would train another model than the one that is
# served
_INERT = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_POSITIVE_INTS = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of a dense Qwen3 or Llama decoder; checked when made (ConfigError)."""

    architecture: Literal["qwen3", "llama"]
    hidden_size: int
    """E."""
    num_layers: int
    """L."""
    num_heads: int
    """H query heads."""
    num_kv_heads: int
    """G key/value heads."""
    head_dim: int
    """D; independent of hidden_size / num_heads."""
    intermediate_size: int
    vocab_size: int
    """V, rows of the embedding and of the head."""
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or ``rope_type`` and its keys in Hugging Face's spelling."""
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            known = " and ".join(ARCHITECTURES)
            raise ConfigError(f"The policy's architecture is {self.architecture!r}; torchspec trains {known}.")
        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"The policy's {name} is {value!r}; it must be a whole number of at least 1.")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"The policy's {name} is {value!r}; it must be a number above 0.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"The policy's num_kv_heads ({self.num_kv_heads}) does not divide its num_heads ({self.num_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(f"The policy's head_dim is {self.head_dim}; rotary embedding needs an even one.")
        if self.architecture == "llama" and self.hidden_size % self.num_heads:
            # transformers' LlamaConfig, which vLLM parses the folder with, refuses this whatever head_dim
            # says
            raise ConfigError(
                f"A Llama policy's num_heads ({self.num_heads}) must divide its hidden_size ({self.hidden_size}), or "
                "no server could load it; choose a divisor, or architecture qwen3."
            )


def shape_from_config(config: PolicyConfig, tokenizer_size: int | None) -> PolicyShape:
    """The shape of a policy that is built from the [policy] table (``config.path`` is empty).

    Args:
        config: the table.
        tokenizer_size: number of token ids, the default of ``vocab_size`` and its least value; None: not
            known.

    Raises:
        ConfigError: sizes that cannot work, or a vocabulary too small for the tokenizer.
    """
    vocab_size = config.vocab_size or tokenizer_size
    if vocab_size is None:
        raise ConfigError("policy.vocab_size is 0 and there is no tokenizer to take it from; set policy.vocab_size.")
    shape = PolicyShape(
        architecture=config.architecture,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=vocab_size,
        rope_theta=float(config.rope_theta),
        rope_scaling=None,
        norm_eps=config.norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    check_vocabulary(shape, tokenizer_size)
    return shape


def check_vocabulary(shape: PolicyShape, tokenizer_size: int | None) -> None:
    """Raises ConfigError when the tokenizer has ids that the embedding lacks; spare rows are fine."""
    if tokenizer_size is not None and tokenizer_size > shape.vocab_size:
        raise ConfigError(
            f"The tokenizer has {tokenizer_size} token ids and the policy's vocab_size is {shape.vocab_size}; use the "
            "policy's own tokenizer, or a vocab_size of at least that many."
        )


def shape_from_hf(found: Mapping[str, Any], where: str) -> PolicyShape:
    """The shape that a config.json declares; ``where`` names it in errors.

    Raises:
        ConfigError: another architecture, a feature that torchtitan's definitions lack, a missing or
            impossible size.
    """
    model_type = _model_type(found, where)
    for name, inert in _INERT.items():
        if found.get(name, inert) not in (inert, None):
            raise ConfigError(f"{where} has {name} = {found[name]!r}; torchspec trains {name} = {inert!r} only.")
    if other := sorted(set(found.get("layer_types") or []) - {"full_attention"}):
        raise ConfigError(f"{where} has layers of type {', '.join(other)}; torchspec trains full_attention only.")
    hidden, heads = _size(found, "hidden_size", where), _size(found, "num_attention_heads", where)
    theta, scaling = _rope(found, where)
    return PolicyShape(
        architecture=model_type,
        hidden_size=hidden,
        num_layers=_size(found, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=_size(found, "num_key_value_heads", where, default=heads),
        # transformers' own defaults: Qwen3Config says 128, LlamaConfig the quotient
        head_dim=_size(found, "head_dim", where, default=128 if model_type == "qwen3" else hidden // max(heads, 1)),
        intermediate_size=_size(found, "intermediate_size", where),
        vocab_size=_size(found, "vocab_size", where),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=found.get("rms_norm_eps", 1e-6),
        max_position_embeddings=_size(found, "max_position_embeddings", where, default=2048),
        tie_word_embeddings=bool(found.get("tie_word_embeddings", False)),
    )


def hf_config(shape: PolicyShape) -> dict[str, Any]:
    """The entries of config.json that the shape decides; both spellings of rope, for transformers 4 and 5."""
    config = {
        "architectures": [ARCHITECTURES[shape.architecture]],
        "model_type": shape.architecture,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {
            "rope_theta": shape.rope_theta,
            **(shape.rope_scaling or {"rope_type": "default"}),
        },
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
    if shape.rope_scaling is not None:
        config["rope_scaling"] = shape.rope_scaling
    return config


def _model_type(found: Mapping[str, Any], where: str) -> str:
    model_type, names = found.get("model_type"), found.get("architectures") or []
    known = ARCHITECTURES.get(model_type)
    if known is None or (names and names != [known]):
        supported = " and ".join(ARCHITECTURES.values())
        raise ConfigError(
            f"{where} declares model_type {model_type!r}, architectures {list(names)}; torchspec trains {supported}."
        )
    return model_type


def _size(found: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = found.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{where} gives {name} = {value!r}; a whole number is needed.")
    return value


def _rope(found: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta``
    (before)."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise ConfigError(f"{where} has rope scaling {kind!r}; torchspec trains {', '.join(ROPE_KEYS)}.")
    try:
        scaling = check_rope_scaling(rope)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0), scaling
