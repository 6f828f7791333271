"""``torchspec export``: write the policy and the draft of a checkpoint as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch

from torchspec import checkpoint
from torchspec.config_file import ONE_RANK, load_config
from torchspec.errors import ConfigError
from torchspec.plugins import load_object


def export(run_dir: Path, step: int | None, to: Path, dtype: str = "float32") -> list[Path]:
    """Export the checkpoint of ``step`` (None: the newest) of the run in ``run_dir`` to ``to/policy`` and ``to/draft``.

    ``dtype`` names the dtype of the tensors written.

    Raises:
        ConfigError: ``to`` is a file.
        RunError: there is no such complete checkpoint, or it does not read.
    """
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is a file; name a folder, in which policy/ and draft/ are made.")
    config = load_config(run_dir / "config.toml", ONE_RANK)  # however many ranks trained it
    state = checkpoint.load_checkpoint(run_dir / "checkpoints", step)
    trainer = load_object(config.trainer)(config, to)
    trainer.setup()
    trainer.restore(state)
    trainer.export(getattr(torch, dtype))
    written = [path for path in (to / "policy", to / "draft") if path.is_dir()]
    print(f"Wrote {', '.join(map(str, written))} from step {trainer.step} in {dtype}.")
    return written
