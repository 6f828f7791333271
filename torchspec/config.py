"""The whole configuration of a run, assembled from one plain config.py per room.

Nothing here imports torch, so that ``torchspec train --help`` answers at once. The text under a field is its help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchspec.data.config import EnvironmentConfig
from torchspec.draft.config import DraftConfig
from torchspec.losses.config import RLConfig
from torchspec.pipeline.config import PipelineConfig
from torchspec.policy.config import PolicyConfig
from torchspec.rollout.config import RolloutConfig, SamplingConfig


@dataclass
class TrainConfig:
    """Length, memory and precision of training."""

    steps: int = 100
    """RL steps."""
    tokens_per_microbatch: int = 4096
    """Tokens packed into one forward and backward; bounds the memory of training."""
    master_dtype: Literal["float32"] = "float32"
    """Dtype of the weights that the optimizer updates."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward; auto is float32 on a CPU and bfloat16 on a GPU."""
    num_threads: int = 0
    """CPU threads of the trainer's matrix products; 0 takes the machine's cores."""
    logprob_chunk_rows: int = 1024
    """Rows whose logits exist at one time, in the policy's loss and in distillation."""
    max_skipped_steps: int = 5
    """Steps in a row that may be skipped for a NaN or Inf before the run fails."""


@dataclass
class ParallelismConfig:
    """How ranks started by torchrun share the work: pipeline x data parallel x context parallel (see [pipeline]).

    Every rank serves its share of the prompts in an engine of its own. Ranks of one pipeline stage are replicas, or
    shards.
    """

    context_parallel_degree: int = 1
    """Ranks that share every packed sequence (must divide the ranks; the rest is data parallel)."""
    trunk_transport: Literal["auto", "gather", "ring"] = "auto"
    """How keys and values travel between context-parallel ranks. gather: once per layer and microbatch, whatever the
    draft's passes. ring: around in each pass, which costs more bytes and less memory. auto: gather where it fits
    trunk_budget_mb, else ring."""
    trunk_budget_mb: int = 4096
    """Memory that auto lets one layer's gathered keys, values and their fp32 gradient sums take on a rank, in MiB."""
    shard: bool = False
    """Shard both models' weights, gradients and optimizer states over the data- and context-parallel ranks (FSDP2)
    instead of replicating them."""
    timeout_s: float = 600.0
    """Longest wait for another rank; past it every rank ends with an error."""


@dataclass
class WarmStartConfig:
    """Supervised training on the environment's own answers before RL, so that there is a reward to climb."""

    steps: int = 0
    """Supervised steps; 0 skips it."""
    batch_size: int = 32
    """Items a step."""
    lr: float = 2e-3
    """Peak learning rate (cosine to a tenth of it)."""


@dataclass
class EvalConfig:
    """Evaluation on held-out items with fixed seeds; runs before the first and after the last step too."""

    every: int = 20
    """Evaluate at the start of steps 1, N+1, 2N+1, ... and after the last; 0 evaluates at both ends only."""
    items: int = 64
    """Held-out items used (at most environment.eval_items)."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0, max_tokens=0))
    """Sampling of evaluation; max_tokens = 0 and empty stop_token_ids follow rollout.sampling."""


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 50
    """RL steps between checkpoints; 0 saves at the end and on an interrupt only."""
    keep: int = 2
    """Newest checkpoints kept; 0 keeps all."""
    resume: bool = False
    """Go on from the newest complete checkpoint in the output folder."""


@dataclass
class MetricsConfig:
    """Logs of the run."""

    samples_per_step: int = 8
    """Sampled responses of each step written to samples.jsonl."""
    print_samples: int = 2
    """Sampled responses of each step shown live."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (needs its login)."""
    wandb_project: str = "torchspec"
    """Project name at Weights & Biases."""


@dataclass
class Config:
    """A TorchSpec run: RL on a policy, co-training of its draft, rollouts by vLLM."""

    output_dir: str = ""
    """Output folder; empty takes outputs/<name of the config file>."""
    seed: int = 0
    """Seed of the run: weights, data order and every request's sampling seed follow from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto takes the GPU where there is one."""
    trainer: str = "torchspec.trainer:CoTrainer"
    """Trainer class as 'module:Class' or 'path/to/file.py:Class': subclass CoTrainer and name yours here."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
