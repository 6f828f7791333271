"""AdamW, its learning-rate schedule and its gradient clip, as one object that the trainer steps and saves."""

from __future__ import annotations

import math

import torch
from torch import nn

from torchspec.optim.config import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Share of ``config.lr`` used by optimizer step ``step`` (0-based) of ``total_steps``."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.decay == "constant":
        return 1.0
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    shape = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape


class Optimizer:
    """AdamW over a module's trainable parameters, with the schedule and the clip of its config.

    Weight decay reaches matrices only. The schedule moves when ``step`` is called, so a skipped step does not use it up.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.num_steps = 0
        named = [p for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in named if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.params = named
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    @property
    def lr(self) -> float:
        """Learning rate that the next ``step`` will use."""
        return self.config.lr * lr_factor(self.config, self.num_steps, self.total_steps)

    def clip(self) -> torch.Tensor:
        """Clip the gradients in place; return their global norm before clipping (0-d, fp32)."""
        limit = self.config.max_grad_norm or math.inf
        return torch.nn.utils.clip_grad_norm_(self.params, limit)

    def step(self) -> None:
        """Apply one update at the current learning rate, then clear the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.num_steps += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        """Everything a resumed run needs to go on bit-equal."""
        return {"adamw": self.adamw.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict) -> None:
        """Take back what ``state_dict`` gave."""
        self.adamw.load_state_dict(state["adamw"])
        self.num_steps = state["num_steps"]
