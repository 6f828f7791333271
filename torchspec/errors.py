"""The errors that end a run with a sentence. The command (torchspec/train.py) catches them once and sets the
exit status."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting cannot work. The message names the setting, its value and what would work. Exit status 2."""


class RunError(RuntimeError):
    """The run cannot go on. The message says what was wrong, where, and what would work. Exit status 1."""


class Interrupted(Exception):
    """SIGINT or SIGTERM stopped the run at a safe point. The message tells what was saved and how to go on.
    Status 130."""
