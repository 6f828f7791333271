"""Logs: one finite, flat line a step, on disk at once; cutting keeps what belongs to the checkpoint and
nothing else."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch

from torchspec.config import Config
from torchspec.errors import ConfigError, RunError
from torchspec.metrics import MetricsLog, cut_logs, last_step, plain, read_rows


def quiet() -> Config:
    config = Config()
    config.metrics.tensorboard = False
    return config


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_finite_line_a_step_on_disk_at_once(tmp_path):
    with MetricsLog(tmp_path, quiet()) as log:
        log.log(
            1,
            {
                "a": 0.1 + 0.2,
                "b": math.nan,
                "c": -math.inf,
                "d": torch.tensor(2.5),
                "e": np.float32(1.5),
                "f": np.int64(3),
                "g": True,
                "h": None,
                "i": torch.tensor(math.nan),
                "step": 99,
            },
        )
        row = lines(tmp_path / "metrics.jsonl")[0]  # before close
        assert row == {
            "step": 1,
            "a": 0.1 + 0.2,
            "b": None,
            "c": None,
            "d": 2.5,
            "e": 1.5,
            "f": 3,
            "g": True,
            "h": None,
            "i": None,
        }
        log.samples(1, [{"prompt": "a\nb\u00e9\u2028", "components": {"x": math.nan}, "seed": 2**62}, {"prompt": "2"}])
        rows = lines(tmp_path / "samples.jsonl") if "\u2028" not in (tmp_path / "samples.jsonl").read_text() else None
        rows = rows or [json.loads(t) for t in (tmp_path / "samples.jsonl").read_text().split("\n") if t]
        assert rows == [
            {"step": 1, "prompt": "a\nb\u00e9\u2028", "components": {"x": None}, "seed": 2**62},
            {"step": 1, "prompt": "2"},
        ]
        assert read_rows(tmp_path / "samples.jsonl") == rows


def test_what_cannot_be_a_metric_is_named():
    with pytest.raises(TypeError, match="train/x is a Tensor"):
        plain(torch.zeros(2), "train/x")
    with pytest.raises(TypeError, match="object"):
        plain(object(), "train/x")


def test_cutting(tmp_path):
    steps = random.randrange(3, 9)
    with MetricsLog(tmp_path, quiet()) as log:
        for step in range(1, 11):
            log.log(step, {"x": random.random()})
            log.samples(step, [{"n": i} for i in range(3)])
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "x": 0.')  # killed while writing
    cut_logs(tmp_path, steps)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:steps], "kept lines stay to the byte"
    assert [r["step"] for r in read_rows(tmp_path / "samples.jsonl")] == [
        s for s in range(1, steps + 1) for _ in range(3)
    ]
    assert last_step(tmp_path) == steps
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "samples.jsonl",
    ], "nothing is left behind"
    with MetricsLog(tmp_path, quiet()) as log:
        log.log(steps + 1, {"x": 1})
    assert last_step(tmp_path) == steps + 1
    cut_logs(tmp_path, 0)
    assert read_rows(tmp_path / "metrics.jsonl") == [] and last_step(tmp_path) is None
    cut_logs(tmp_path / "nothing_here", 3)


@pytest.mark.parametrize("tail", ['{"step": 2', '{"step": 2, "x": 1}', "\x00\x00\x00", "5\n", '{"x": 1}\n'])
def test_a_last_line_cut_off_by_a_kill_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    assert read_rows(path) == [{"step": 1}]
    cut_logs(tmp_path, 10)
    assert path.read_text() == '{"step": 1}\n'


def test_a_broken_line_in_the_middle_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        cut_logs(tmp_path, 10)
    assert path.read_text() == '{"step": 1}\nrubbish\n{"step": 2}\n'


def test_a_full_disk_while_cutting_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left"):
        cut_logs(tmp_path, 1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n' and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_while_logging_is_a_sentence():
    import os

    from torchspec.metrics import _append

    if not os.path.exists("/dev/full"):
        pytest.fail("this machine has no /dev/full")
    with open("/dev/full", "w") as file, pytest.raises(RunError, match="No space left.*--checkpoint.resume"):
        try:
            _append(file, [{"step": 1}])
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def test_tensorboard_holds_the_steps_and_hides_those_past_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config()
    with MetricsLog(tmp_path, config) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": float(step), "bad": math.nan})
    cut_logs(tmp_path, 2)
    with MetricsLog(tmp_path, config) as log:
        log.log(3, {"reward/mean": 30.0})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert "bad" not in board.Tags()["scalars"]


def test_wandb_is_optional_and_gets_the_same_numbers(tmp_path, monkeypatch):
    import sys
    import types

    config = quiet()
    config.metrics.wandb = True
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="metrics.wandb"):
        MetricsLog(tmp_path, config)
    got, inits = [], []

    def init(**kw):
        inits.append(kw)
        return types.SimpleNamespace(
            log=lambda values, step: got.append((step, values)), finish=lambda: got.append("end")
        )

    def refuse(**settings):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(ConfigError, match=r"could not start \(RuntimeError: no API key\); log in"):
        MetricsLog(tmp_path, config)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for _ in range(2):
        with MetricsLog(tmp_path, config) as log:
            log.log(1, {"a": 1.5, "b": math.nan, "c": "text"})
    assert got == [(1, {"a": 1.5}), "end"] * 2
    assert inits[0]["id"] == inits[1]["id"] and len(inits[0]["id"]) == 8, "a resumed run goes on in the same W&B run"
    assert inits[0]["resume"] == "allow" and inits[0]["config"]["draft"]["ttt_steps"] == 3
