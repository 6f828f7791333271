"""What the user sees while a run goes on: a live table and progress bars on a terminal, plain lines anywhere
else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from torchspec.config import Config

ROWS = 10  # steps kept in the live table
QUIET_S = 10.0  # plain lines: a phase that is still going on is told at most this often
REDRAW_S = 0.1

# Metric, heading, format: the columns of the table and the words of a plain line.
COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/reward", "eval", "{:.3f}"),
    ("spec/accept_len", "accept len", "{:.2f}"),
    ("draft/loss", "draft loss", "{:.3f}"),
    ("policy/grad_norm", "grad norm", "{:.2f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("train/logprob_gap", "logp gap", "{:.1e}"),
    ("rollout/tokens_per_s", "tokens/s", "{:.0f}"),
    ("time/step", "seconds", "{:.1f}"),
)


class Live:
    """Context manager around a run. On a terminal it redraws in place; elsewhere it prints one line per
    event.

    Nothing is drawn from another thread: the calls below redraw.
    """

    def __init__(self, config: Config, terminal: bool | None = None) -> None:
        self.total = config.train.steps
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self._rows: list[tuple[int, Mapping[str, Any]]] = []
        self._phase = ""
        self._phase_begin = self._told = self._drawn = 0.0
        self._display: Any = None

    def __enter__(self) -> Live:
        if self.terminal:
            self._start_display()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._display is not None:
            self._bars.update(self._phase_bar, visible=False)
            self._draw(force=True)
            self._display.stop()
            self._display = None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done; ``metrics`` as in metrics.jsonl."""
        self._phase = ""
        if self._display is None:
            words = [f"{heading} {form}" for heading, form in _cells(metrics) if form]
            self._line(f"step {step}/{self.total}  " + "  ".join(words))
            return
        self._rows = [*self._rows, (step, dict(metrics))][-ROWS:]
        self._bars.update(self._phase_bar, visible=False)
        if step > 0 and not self._bars.tasks[self._run_bar].started:
            self._bars.start_task(self._run_bar)
        self._bars.update(self._run_bar, completed=step)
        self._draw(force=True)

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        """``done`` of ``total`` units of a phase such as "rollout"; ``detail`` is free text. Cheap: call it
        often."""
        now = time.monotonic()
        if name != self._phase or done == 0:
            self._phase, self._phase_begin, self._told = name, now, now
        if self._display is not None:
            self._bars.update(
                self._phase_bar,
                description=f"{name} {detail}".strip(),
                completed=done,
                total=total,
                visible=True,
            )
            self._draw(force=done >= total)
        elif now - self._told >= QUIET_S or (done >= total and now - self._phase_begin >= QUIET_S):
            self._told = now
            self._line(f"  {name} {done}/{total}  {now - self._phase_begin:.0f} s  {detail}".rstrip())

    def sample(self, text: str) -> None:
        """A sampled response, above the table."""
        self.note(f"  {text}")

    def note(self, text: str) -> None:
        """Any other line."""
        if self._display is None:
            self._line(text)
        else:
            from rich.text import Text

            self._display.console.print(Text(_printable(text, "utf-8"), style="dim"))

    def _line(self, text: str) -> None:
        print(_printable(text, sys.stdout.encoding or "utf-8"), flush=True)

    def _start_display(self) -> None:
        from rich import progress
        from rich.live import Live as RichLive

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            speed_estimate_period=3600,
            auto_refresh=False,
        )
        self._run_bar = self._bars.add_task("steps", total=self.total)
        self._phase_bar = self._bars.add_task("", total=1, visible=False)
        # auto_refresh off: no thread of rich's beside the engine's, and none across a fork of the scorers'
        # workers.
        self._display = RichLive(self._render(), auto_refresh=False)
        self._display.start(refresh=True)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        if not self._rows:
            return Group(self._bars)
        seen = [c for c in COLUMNS if any(c[0] in metrics for _, metrics in self._rows)]
        table = Table(header_style="bold", box=None, pad_edge=False)
        table.add_column("step", justify="right")
        for _, heading, _ in seen:
            table.add_column(heading, justify="right")
        for step, metrics in self._rows:
            table.add_row(str(step), *[_cell(metrics, name, form) for name, _, form in seen])
        return Group(table, self._bars)

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._display.update(self._render(), refresh=True)


def _cell(metrics: Mapping[str, Any], name: str, form: str) -> str:
    value = metrics.get(name)
    return "" if value is None else form.format(float(value))


def _cells(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(heading, _cell(metrics, name, form)) for name, heading, form in COLUMNS]


def _printable(text: str, encoding: str) -> str:
    """``text`` without control characters (a sampled response may hold any) and within what the output can
    encode."""
    text = "".join(c if c.isprintable() or c in "\n" else repr(c)[1:-1] for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


class QuietLive(contextlib.nullcontext):
    """The display of a rank that is not the main one: none."""

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""
