"""Settings of the vLLM engine and of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Softmax temperature; the trainer divides its logits by it too. 0 is greedy (eval only)."""
    max_tokens: int = 64
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the tokenizer's and those of the model's generation_config."""
    top_p: float = 1.0
    """Nucleus sampling. Only in eval: in a training rollout the trainer's log-probabilities would not match."""
    top_k: int = 0
    """Top-k sampling, 0 = off. Only in eval, as top_p."""
    min_p: float = 0.0
    """Refused: vLLM does not support it with speculative decoding."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """Refused: vLLM does not support it with speculative decoding."""


@dataclass
class RolloutConfig:
    """The in-process vLLM engine."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling of training rollouts."""
    num_speculative_tokens: int = 3
    """Tokens the draft proposes per verification; 0 serves without speculation."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Engine dtype; auto is float32 on a CPU and bfloat16 on a GPU."""
    max_model_len: int = 512
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int = 64
    """Requests the engine runs at once."""
    max_num_batched_tokens: int = 0
    """Token budget of one engine step; 0 sizes it so that every prompt prefills whole (split prefills crash seeded
    requests on CPU)."""
    kv_cache_mb: int = 256
    """Memory of the KV cache on a CPU, in MiB."""
    threads: int = 1
    """CPU threads of the engine while it generates; 0 takes the trainer's. More than 1 pays for models above some 100M
    parameters on an idle machine; with small ones, or beside other work, the threads wait for each other (measured: 13
    times slower)."""
    gpu_memory_utilization: float = 0.4
    """Share of the GPU's memory for the engine (a GPU is shared with the trainer)."""
    enforce_eager: bool = True
    """Run the engine without torch.compile and CUDA graphs."""
    sleep: bool = False
    """Put the engine to sleep while training (GPU): frees its memory; both models are sent again on waking."""
    deadline_s: float = 600.0
    """Longest time of one rollout; past it the run fails with a report of what was unfinished."""
