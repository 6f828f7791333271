"""Stopping a run by SIGINT or SIGTERM at a safe point."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


class StopFlag:
    """Set by SIGINT and SIGTERM, looked at between pieces of work. A second signal exits at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            os._exit(130)  # at once, wherever we are; what is on disk is complete
        self.signal = signal.Signals(number).name
        print(
            f"{self.signal}: stopping at the next safe point and saving; once more exits at once.",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
