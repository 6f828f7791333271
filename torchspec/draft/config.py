"""What the draft is and how it is co-trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torchspec.optim.config import OptimizerConfig


@dataclass
class DraftConfig:
    """The speculator that follows the policy."""

    enabled: bool = True
    """Co-train and serve a draft; false runs plain RL without speculation."""
    algorithm: str = "eagle3"
    """A registered draft (eagle3), or your own as 'module:Class' or 'path/to/file.py:Class'."""
    path: str = ""
    """Hugging Face folder of a draft to start from. Empty: random weights, head copied from the policy."""
    ttt_steps: int = 3
    """Passes K of the unroll (training-time test). Serve with num_speculative_tokens up to about this."""
    tap_ids: tuple[int, ...] = ()
    """Tap ids, ascending: id i is the residual stream entering decoder layer i (0 = embeddings, L = after the last
    layer). Empty: (2, L//2, L-3) where these differ, else (1, L//2, L-1)."""
    vocab_size: int = 0
    """Draft vocabulary Vd; 0 uses the policy's full vocabulary, smaller keeps the Vd tokens most frequent in sample
    data (d2t is exported)."""
    num_heads: int = 0
    """Query heads; 0 takes the policy's."""
    num_kv_heads: int = 0
    """Key/value heads; 0 takes the policy's."""
    head_dim: int = 0
    """Head size; 0 takes the policy's."""
    intermediate_size: int = 0
    """Feed-forward width; 0 takes the policy's."""
    norm_before_residual: bool = False
    """Carry the normed hidden state as the residual instead of the raw one (EAGLE-3 checkpoints of both kinds
    exist)."""
    objective: Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_hybrid", "hard_ce"] = "forward_kl"
    """Distillation objective; forward_kl is soft cross-entropy against the policy's distribution."""
    temperature: float = 1.0
    """Softmax temperature of teacher and student inside the objective."""
    position_gate: bool = False
    """With a draft vocabulary: count only rows whose most likely policy token is inside it."""
    pass_weights: tuple[float, ...] = ()
    """Weight alpha_k of each pass, one per ttt_steps. Empty: all 1."""
    loss_weight: float = 1.0
    """Factor on the draft loss (the draft has an optimizer of its own, so this matters to clipping only)."""
    train_on: Literal["response", "all"] = "response"
    """Which predicted tokens count: sampled response tokens, or prompt tokens too."""
    use_dropped_groups: bool = True
    """Let the draft learn from groups whose advantage is zero (the policy drops them; this costs a forward pass)."""
    every: int = 1
    """Train the draft on every N-th step; its served weights change on those steps."""
    extra_steps: int = 0
    """Further draft-only optimizer steps on this rollout's stored taps after the joint one."""
    stage: int = -1
    """Under a pipeline: the stage beside which the draft lives; -1 is the last, where the policy's head is. Another one
    needs schedule = deferred."""
    schedule: Literal["inline", "deferred"] = "inline"
    """Under a pipeline: inline trains the draft in its stage's forward; deferred keeps the taps and fills the time in
    which its rank would wait for the others. The gradients are the same."""
    compile: bool = False
    """torch.compile the draft's unroll."""
    args: dict[str, Any] = field(default_factory=dict)
    """Free settings for a draft of your own, passed to it untouched."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-5, weight_decay=0.0))
    """The draft's own optimizer. Its rate is usually 10 to 50 times the policy's."""
