"""Logs of a run: metrics.jsonl, samples.jsonl, TensorBoard, and Weights & Biases by a switch.

One flat object a step; every step is on disk before the next begins. DESIGN section 10 lists the names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from torchspec.config import Config
from torchspec.errors import ConfigError, RunError

LOGS = ("metrics.jsonl", "samples.jsonl")


class MetricsLog:
    """Appends to the logs in ``output_dir``; on resume call ``cut_logs`` before making one.

    Raises RunError where the disk refuses, ConfigError where W&B is wanted and missing.
    """

    def __init__(self, output_dir: str | Path, config: Config) -> None:
        self.output_dir = Path(output_dir)
        self._metrics = _open(self.output_dir / "metrics.jsonl")
        self._samples = _open(self.output_dir / "samples.jsonl")
        last = last_step(self.output_dir)
        self._board = self._tensorboard(last) if config.metrics.tensorboard else None
        self._wandb = self._wandb_run(config) if config.metrics.wandb else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line for ``step``: numbers (also 0-dim tensors; NaN and Inf become null), booleans, text,
        None."""
        row = {
            "step": step,
            **{name: plain(value, name) for name, value in metrics.items() if name != "step"},
        }
        _append(self._metrics, [row])
        values = {name: value for name, value in row.items() if _is_number(value) and name != "step"}
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """One line of samples.jsonl per row, each with its step."""
        _append(self._samples, [{"step": step, **plain(dict(row), "sample")} for row in rows])

    def close(self) -> None:
        """Close the files and end the W&B run."""
        self._metrics.close()
        self._samples.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tensorboard(self, last: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier process of this run wrote past the checkpoint that it resumed from.
        return SummaryWriter(str(self.output_dir / "tensorboard"), purge_step=None if last is None else last + 1)

    def _wandb_run(self, config: Config) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb = true needs the package wandb, which is not installed; install it or set it to false."
            ) from error
        identity = self.output_dir / "wandb_id.txt"  # so that a resumed run goes on in the same W&B run
        if not identity.exists():
            identity.write_text(secrets.token_hex(4))
        try:
            return wandb.init(
                project=config.metrics.wandb_project,
                name=self.output_dir.name,
                dir=str(self.output_dir),
                id=identity.read_text().strip(),
                resume="allow",
                config=dataclasses.asdict(config),
            )
        except Exception as error:  # no key, no network, no such project: its own words
            raise ConfigError(
                f"metrics.wandb = true, and Weights & Biases could not start ({type(error).__name__}: {error}); log in "
                "with `wandb login`, set WANDB_MODE=offline, or set it to false."
            ) from error


def plain(value: Any, name: str = "value") -> Any:
    """``value`` as JSON can hold it: floats finite or null, tensors of one element as numbers; TypeError for
    the rest."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, name) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain(value.item(), name)
    raise TypeError(
        f"The metric {name} is a {type(value).__name__}, which has no place in a line of JSON; log a number."
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, in order; [] where it is missing. A last line that was cut off by a kill is left
    out.

    Raises RunError where a line before the last is not a JSON object.
    """
    return [row for _, row in _rows(path)]


def last_step(output_dir: str | Path) -> int | None:
    """The last step in metrics.jsonl, or None."""
    steps = [row["step"] for row in read_rows(Path(output_dir) / "metrics.jsonl")]
    return max(steps, default=None)


def cut_logs(output_dir: str | Path, step: int) -> None:
    """Drop the lines of metrics.jsonl and samples.jsonl past ``step``, and a last line that a kill cut off.

    Each file is replaced whole or not at all. Raises RunError where it cannot be read or written.
    """
    for name in LOGS:
        path = Path(output_dir) / name
        if not path.exists():
            continue
        temporary = path.with_name(f".{name}.cut")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                for line, row in _rows(path):
                    if row["step"] <= step:
                        file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise RunError(
                f"{path} could not be cut back to step {step}: {error}. It is as it was; free space and resume again."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, row) of each whole line of a log."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        broken: int | None = None
        for number, line in enumerate(file, 1):
            if broken is not None and line.strip():
                raise RunError(f"{path}, line {broken} is not a line of this log; remove that line.")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row["step"], int) or not line.endswith("\n"):
                    raise ValueError
            except (ValueError, TypeError, KeyError):
                broken = number  # forgiven if it is the last one
                continue
            yield line.rstrip("\n"), row


def _open(path: Path) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}.") from error


def _append(file: TextIO, rows: list[dict[str, Any]]) -> None:
    try:
        file.write("".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))
        file.flush()
    except OSError as error:
        raise RunError(
            f"{file.name} could not be written: {error}. Free some space and go on with --checkpoint.resume."
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
