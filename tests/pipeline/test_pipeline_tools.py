"""The pipeline's two tools through their commands: the simulator's table and picture, the benchmark's rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOLS / name, *arguments], capture_output=True, text=True, timeout=300)


def test_the_simulator_hides_a_draft_in_the_drain(tmp_path):
    rows_file = tmp_path / "rows.json"
    shape = ("--schedule", "GPipe", "--pp", "4", "--microbatches", "4", "--draft", "0.5")
    done = tool("simulate_schedule.py", *shape, "--timeline", "--json", str(rows_file))
    assert done.returncode == 0, done.stderr
    inline, deferred = json.loads(rows_file.read_text())
    # By hand: forwards and backwards of 4 microbatches over 4 ranks take (4 + 3) * (1 + 2) = 21. Inline, each draft of
    # 0.5
    # stands between two forwards of the last rank: 23. Deferred, all four run while the others drain for 3 * 2.
    assert inline["step"] == pytest.approx(23) and inline["step_ratio"] == pytest.approx(23 / 21)
    assert (
        deferred["step"] == pytest.approx(21)
        and deferred["hidden"] == pytest.approx(1)
        and deferred["idle"] == pytest.approx(6)
    )
    assert done.stdout.count("rank  3") == 3 and "D" in done.stdout


def test_the_simulator_refuses_what_no_schedule_takes():
    done = tool("simulate_schedule.py", "--schedule", "1F1B", "--pp", "8", "--microbatches", "4")
    assert done.returncode == 1 and "1F1B needs at least as many microbatches" in done.stderr


def test_the_simulator_draws(tmp_path):
    picture = tmp_path / "timeline.svg"
    done = tool(
        "simulate_schedule.py", "--schedule", "DualPipeV", "--pp", "2", "--microbatches", "4", "--picture", str(picture)
    )
    assert done.returncode == 0 and picture.read_text().count("<path") > 50, done.stderr


def test_the_benchmark_writes_the_rows_that_it_prints(tmp_path):
    rows_file = tmp_path / "rows.json"
    small = ("--rows", "16", "--width", "32", "--microbatches", "4", "--rounds", "1", "--schedule", "Interleaved1F1B")
    done = tool("bench_pipeline.py", *small, "--json", str(rows_file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(rows_file.read_text())
    assert [row["draft_schedule"] for row in rows] == ["inline", "deferred"]
    named = ("schedule", "pp", "microbatches", "draft_schedule", "step_ratio", "taps_only_ratio", "predicted_ratio")
    assert all(name in row and name in done.stdout for row in rows for name in named)
    assert all(row["step_ratio"] > 0 and row["predicted_ratio"] >= 1 for row in rows)
