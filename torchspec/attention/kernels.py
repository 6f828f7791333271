"""Which trunk kernel serves a tensor.

A kernel is a module (or object) with two functions, ``trunk_forward(q, k, v, view, scale) -> (out, lse)`` and
``trunk_backward(do, q, k, v, out, lse, view, scale) -> (dq, dk, dv)``; ``torchspec.attention.cpu`` documents
them. The branch part and all merges are shared (``torchspec.attention.merge``).
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from torchspec.attention import cpu, cuda

_KERNELS: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}


def kernel_for(x: Tensor) -> ModuleType:
    """The kernel of x's device; raises ValueError where there is none (nothing falls back silently)."""
    kernel = _KERNELS.get(x.device.type)
    if kernel is None:
        raise ValueError(f"branch_attention has kernels for {sorted(_KERNELS)}, not for a tensor on {x.device}.")
    return kernel
