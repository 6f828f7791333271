"""What the policy is: a Hugging Face folder, or an architecture built from scratch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchspec.optim.config import OptimizerConfig


@dataclass
class PolicyConfig:
    """The model being post-trained (torchtitan's dense Qwen3 or Llama)."""

    path: str = ""
    """Hugging Face folder (config.json, *.safetensors, tokenizer). Empty: build from the fields below."""
    architecture: Literal["qwen3", "llama"] = "qwen3"
    """Architecture when path is empty; with a path, config.json decides."""
    hidden_size: int = 128
    """Width E of the residual stream."""
    num_layers: int = 4
    """Decoder layers L."""
    num_heads: int = 4
    """Query heads H."""
    num_kv_heads: int = 2
    """Key/value heads Hkv; must divide num_heads."""
    head_dim: int = 32
    """Size of a head. vLLM on CPU needs 32 or more."""
    intermediate_size: int = 384
    """Width of the SwiGLU feed-forward layer."""
    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    max_position_embeddings: int = 2048
    """Longest context the model is declared for."""
    tie_word_embeddings: bool = True
    """Share the embedding matrix with the output head."""
    activation_checkpoint: bool = False
    """Recompute each decoder layer in the backward instead of saving its activations."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    """The policy's own optimizer, schedule and gradient clip."""
