"""AdamW, its learning-rate schedule and its gradient clip, as one object that the trainer steps and saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from torchspec.optim.config import OptimizerConfig
from torchspec.shard import slice_for, whole


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
    """AdamW over named parameters, with the schedule and the clip of its config.

    Weight decay reaches matrices only. The schedule moves when ``step`` is called, so a skipped step does not use it
    up. State is kept by name, so that ranks that hold other parts of the model can read it.

    Args:
        named: name -> parameter; those without requires_grad are left out.
        config: the table.
        total_steps: length of the schedule.
        total_norm: (parameters) -> norm of the whole gradient, where other ranks hold parts of it; None: all are here.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        total_steps: int,
        total_norm: Callable[[list[nn.Parameter]], torch.Tensor] | None = None,
    ) -> None:
        self.config, self.total_steps, self.total_norm = config, total_steps, total_norm
        self.num_steps = 0
        self.named = {name: p for name, p in named.items() if p.requires_grad}
        self.params = list(self.named.values())
        groups = [
            {"params": [p for p in self.params if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.params if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    @property
    def lr(self) -> float:
        """Learning rate that the next ``step`` will use."""
        return self.config.lr * lr_factor(self.config, self.num_steps, self.total_steps)

    def clip(self) -> torch.Tensor:
        """Clip the gradients in place; return their global norm before clipping (0-d, fp32)."""
        limit = self.config.max_grad_norm or math.inf
        if self.total_norm is None:
            norm = whole(torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None]))
        else:
            norm = self.total_norm(self.params)
        torch.nn.utils.clip_grads_with_norm_(self.params, limit, norm)
        return norm

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
        moments = {name: dict(self.adamw.state[p]) for name, p in self.named.items() if p in self.adamw.state}
        return {"adamw": moments, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict) -> None:
        """Take back what ``state_dict`` gave; names of other parameters are passed over."""
        self.num_steps = state["num_steps"]
        self.adamw.state.clear()
        for name, p in self.named.items():
            if name in state["adamw"]:
                moments = state["adamw"][name]  # AdamW counts its steps in a tensor on the CPU
                self.adamw.state[p] = {
                    k: v.clone() if k == "step" else torch.empty_like(p, requires_grad=False).copy_(slice_for(v, p))
                    for k, v in moments.items()
                }
