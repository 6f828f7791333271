"""``torchspec export``: write the policy and the draft of a checkpoint as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch

from torchspec import checkpoint
from torchspec.config_file import load_config
from torchspec.plugins import load_object


def export(run_dir: Path, step: int | None, to: Path, dtype: str = "float32") -> list[Path]:
    """Export the checkpoint of ``step`` (None: the newest) of the run in ``run_dir`` to ``to/policy`` and ``to/draft``.

    ``dtype`` names the dtype of the tensors written.

    Raises:
        RunError: there is no such complete checkpoint, or it does not read.
    """
    # However many ranks trained it: one writes the folders.
    one_rank = ["--parallelism.context-parallel-degree", "1", "--parallelism.no-shard", "--pipeline.ranks", "1"]
    config = load_config(run_dir / "config.toml", one_rank)
    state = checkpoint.load_checkpoint(run_dir / "checkpoints", step)
    trainer = load_object(config.trainer)(config, to)
    trainer.setup()
    trainer.restore(state)
    trainer.export(getattr(torch, dtype))
    written = [path for path in (to / "policy", to / "draft") if path.is_dir()]
    print(f"Wrote {', '.join(map(str, written))} from step {trainer.step} in {dtype}.")
    return written
