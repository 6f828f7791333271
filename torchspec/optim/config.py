"""Optimizer and learning-rate settings, one instance each for the policy and the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class OptimizerConfig:
    """AdamW with a warm-up and a decay; the policy and the draft each have their own."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two moment decays."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to matrices only (norm weights are exempt)."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm; 0 turns clipping off (the norm is still logged)."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate climbs linearly from 0 to lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, down to min_lr_ratio at the run's last step."""
    min_lr_ratio: float = 0.1
    """Floor of the decay as a share of lr."""
