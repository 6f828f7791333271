"""Checkpoints: complete or absent, never half.

A checkpoint is a folder ``checkpoints/step-N`` with ``state.pt`` and, written last, the mark ``COMPLETE``. It is made in a
hidden folder beside it and renamed, so that a kill or a full disk at any moment leaves the earlier ones as they were.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from torchspec.errors import RunError
from torchspec.files import fsync

MARK = "COMPLETE"


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints under ``folder`` (``<output_dir>/checkpoints``), ascending."""
    names = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(int(p.name[5:]) for p in names if p.name[5:].isdigit() and (p / MARK).is_file())


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write ``state`` as ``folder/step-N`` and remove the oldest complete ones beyond ``keep`` (0 keeps all).

    Raises:
        RunError: the disk refused; the checkpoints already there are untouched.
    """
    final, partial = folder / f"step-{step}", folder / f".step-{step}.partial"
    if step in complete_steps(folder):
        return final  # the state after a step is what it is: nothing to write twice
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        torch.save(state, partial / "state.pt")
        fsync(partial / "state.pt")
        (partial / MARK).write_text(f"step {step}\n")
        fsync(partial / MARK)
        shutil.rmtree(final, ignore_errors=True)  # without its mark it was never a checkpoint
        os.replace(partial, final)
        fsync(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = complete_steps(folder)
        raise RunError(
            f"The checkpoint of step {step} could not be written to {folder} ({error}). "
            f"Complete checkpoints kept: {kept or 'none'}. Free some space and resume."
        ) from error
    if keep:
        for old in complete_steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old}", ignore_errors=True)
    return final


def load_checkpoint(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Read the newest complete checkpoint under ``folder``, or the one of ``step``, onto the CPU.

    Raises:
        RunError: there is none, or its file does not read.
    """
    steps = complete_steps(folder)
    if not steps:
        raise RunError(f"There is no complete checkpoint in {folder}; start the run without --checkpoint.resume.")
    if step is not None and step not in steps:
        raise RunError(f"There is no complete checkpoint of step {step} in {folder}; there are those of steps {steps}.")
    path = folder / f"step-{steps[-1] if step is None else step}" / "state.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        others = [s for s in steps if f"step-{s}" != path.parent.name]
        raise RunError(
            f"The checkpoint {path} does not read ({type(error).__name__}: {error}). "
            f"Remove its folder to go on from an earlier one{f' (steps {others})' if others else ''}."
        ) from error
