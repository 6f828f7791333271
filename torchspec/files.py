"""Writing files and folders so that at every moment the old or the new content is there, also after a power cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk: no power cut then leaves a renamed but empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its place when the body succeeds and vanishes when it fails.

    A rename cannot replace a folder that has files, so the old one steps aside first; it is put back if that fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    old = new.with_name(new.name.replace(".new-", ".old-"))
    try:
        yield new
        new.chmod(0o755)
        for path in filter(Path.is_file, new.iterdir()):  # safetensors makes files that only their owner reads
            path.chmod(0o644)
        for path in (*sorted(new.iterdir()), new):
            fsync(path)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        fsync(folder.parent)
    except BaseException:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
