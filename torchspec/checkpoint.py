"""Checkpoints: complete or absent, never half.

A checkpoint is a folder ``checkpoints/step-N`` with ``state-P.pt`` of every pipeline rank P and, written last, the mark
``COMPLETE``. It is made in a hidden folder beside it and renamed, so that a kill or a full disk at any moment leaves
the earlier ones as they were. Everything in it is kept by name: a run may resume with another number of pipeline ranks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchspec.errors import RunError
from torchspec.files import fsync

MARK = "COMPLETE"


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints under ``folder`` (``<output_dir>/checkpoints``), ascending."""
    names = folder.glob("step-*") if folder.is_dir() else ()
    return sorted(int(p.name[5:]) for p in names if p.name[5:].isdigit() and (p / MARK).is_file())


def write_part(folder: Path, step: int, part: int, state: dict[str, Any]) -> None:
    """Write what one rank holds of the state after ``step``; ``complete`` makes a checkpoint of all parts.

    Raises:
        RunError: the disk refused; the checkpoints already there are untouched.
    """
    partial = _partial(folder, step)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial / f"state-{part}.pt")
        fsync(partial / f"state-{part}.pt")
    except (OSError, RuntimeError) as error:
        _refused(folder, step, error)


def complete(folder: Path, step: int, num_parts: int, keep: int) -> Path:
    """Make ``folder/step-N`` of its written parts, and remove the oldest complete ones beyond ``keep`` (0 keeps all).

    Raises:
        RunError: a part is missing or the disk refused; the checkpoints already there are untouched.
    """
    final, partial = folder / f"step-{step}", _partial(folder, step)
    try:
        wanted = {f"state-{part}.pt" for part in range(num_parts)}
        for path in partial.iterdir():
            if path.name not in wanted:
                path.unlink()  # of an earlier attempt that was killed, perhaps with more ranks
        if missing := wanted - {path.name for path in partial.iterdir()}:
            raise OSError(f"{sorted(missing)[0]} is not there; all ranks must write to the same file system")
        (partial / MARK).write_text(f"step {step}, {num_parts} parts\n")
        fsync(partial / MARK)
        shutil.rmtree(final, ignore_errors=True)  # without its mark it was never a checkpoint
        os.replace(partial, final)
        fsync(folder)
    except (OSError, RuntimeError) as error:
        _refused(folder, step, error)
    if keep:
        for old in complete_steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old}", ignore_errors=True)
    return final


def _partial(folder: Path, step: int) -> Path:
    return folder / f".step-{step}.partial"


def _refused(folder: Path, step: int, error: Exception) -> NoReturn:
    shutil.rmtree(_partial(folder, step), ignore_errors=True)
    raise RunError(
        f"The checkpoint of step {step} could not be written to {folder} ({error}). "
        f"Complete checkpoints kept: {complete_steps(folder) or 'none'}. Free some space and resume."
    ) from error


def load_checkpoint(folder: Path, step: int | None = None) -> dict[str, Any]:
    """The state in the newest complete checkpoint under ``folder``, or in the one of ``step``, on the CPU.

    Raises:
        RunError: there is none, or its file does not read.
    """
    steps = complete_steps(folder)
    if not steps:
        raise RunError(f"There is no complete checkpoint in {folder}; start the run without --checkpoint.resume.")
    if step is not None and step not in steps:
        raise RunError(f"There is no complete checkpoint of step {step} in {folder}; there are those of steps {steps}.")
    path = folder / f"step-{steps[-1] if step is None else step}"
    try:
        files = [path / f"state-{part}.pt" for part in range(int((path / MARK).read_text().split()[2]))]
        # Mapped, not read: a rank of a pipeline takes only its own part of the weights.
        return _union([torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files])
    except Exception as error:
        others = [s for s in steps if f"step-{s}" != path.name]
        raise RunError(
            f"The checkpoint {path} does not read ({type(error).__name__}: {error}). "
            f"Remove its folder to go on from an earlier one{f' (steps {others})' if others else ''}."
        ) from error


def _union(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of the parts of several ranks; where two have the same entry, they have the same value."""
    merged: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            known = merged.get(name)
            merged[name] = _union([known, value]) if isinstance(value, dict) and isinstance(known, dict) else value
    return merged
