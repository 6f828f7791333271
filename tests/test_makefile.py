"""The Makefile: refusals in one sentence before anything is made; what is installed, in which order, and when
again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def make(folder: Path, *args: str) -> subprocess.CompletedProcess:
    # What an outer make was told must not reach the inner one.
    outer = ("MAKE", "MFLAGS", "PYTEST_ARGS", "PYTHON", "EXTRA")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    env["PATH"] = f"{folder / 'bin'}:{env['PATH']}"
    return subprocess.run(["make", *args], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def fake_venv(folder: Path, pip: str = "true") -> Path:
    """A .venv whose pip writes down what it was asked."""
    script(folder / ".venv/bin/python", 'echo "python $*" >> calls')
    script(folder / ".venv/bin/pip", f'echo "pip $*" >> calls; {pip}')
    return folder / "calls"


@pytest.mark.parametrize(
    "uname, args, words",
    [
        ("Darwin arm64", [], "installs on Linux x86_64"),
        ("Linux aarch64", [], "this is Linux aarch64"),
        (
            "Linux x86_64",
            ["PYTHON=/nowhere/python"],
            "Python 3.11 to 3.14, and '/nowhere/python' does not run",
        ),
        ("Linux x86_64", ["PYTHON=./old"], "'./old' is 3.10"),
        ("Linux x86_64", ["PYTHON=./bare"], "install its venv package"),
        ("Linux x86_64", ["EXTRA=tpu"], "EXTRA=tpu is unknown"),
    ],
)
@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_refusals_come_before_anything_is_made(folder, uname, args, words, target):
    system, machine = uname.split()
    script(folder / "bin/uname", f'[ "$1" = -s ] && echo {system} || echo {machine}')
    script(folder / "old", "echo 3.10")
    script(folder / "bare", 'case "$2" in *version_info*) echo 3.12;; *) exit 1;; esac')
    before = sorted(folder.rglob("*"))
    done = make(folder, target, "EXTRA=cpu", *args)
    assert done.returncode != 0 and words in done.stderr
    sentences = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(sentences) == 1
    assert sorted(folder.rglob("*")) == before


def test_the_cpu_install_in_order_and_only_when_needed(folder):
    calls = fake_venv(folder)
    assert make(folder, "test", "EXTRA=cpu", "PYTEST_ARGS=-m parity").returncode == 0
    install = [
        "pip install torch==2.13.0+cpu triton==3.7.1",
        "pip install -e .[cpu,test]",
        "pip uninstall -y torchvision torchaudio torchcodec",
    ]
    assert calls.read_text().splitlines() == [*install, "python -m pytest -n 2 --dist loadfile -m parity"]
    calls.unlink()
    assert make(folder, "test", "EXTRA=cpu").returncode == 0
    assert calls.read_text().splitlines() == ["python -m pytest -n 2 --dist loadfile"], (
        "an install that is up to date is left alone"
    )
    calls.unlink()
    later = time.time() + 10
    os.utime(folder / "pyproject.toml", (later, later))
    assert make(folder, "install", "EXTRA=cpu").returncode == 0
    assert calls.read_text().splitlines() == install, "other requirements: install again"


def test_the_gpu_install_and_no_mixing(folder):
    calls = fake_venv(folder)
    script(folder / "bin/nvidia-smi", "echo GPU 0")
    assert make(folder, "install").returncode == 0
    assert calls.read_text().splitlines() == ["pip install -e .[gpu,test]"]
    done = make(folder, "install", "EXTRA=cpu")
    assert done.returncode != 0 and "holds the gpu install" in done.stderr


def test_a_missing_torch_build_is_explained_and_the_install_not_called_done(folder):
    fake_venv(folder, pip="exit 1")
    done = make(folder, "test", "EXTRA=cpu")
    assert done.returncode != 0 and "PIP_EXTRA_INDEX_URL" in done.stderr
    assert not (folder / ".venv/.installed-cpu").exists()


def test_quickstart_moves_an_earlier_run_aside(folder):
    calls = fake_venv(folder)
    script(folder / ".venv/bin/torchspec", 'echo "torchspec $*" >> calls')
    (folder / "outputs/quickstart").mkdir(parents=True)
    (folder / "outputs/quickstart/metrics.jsonl").write_text("precious")
    done = make(folder, "quickstart", "EXTRA=cpu")
    assert done.returncode == 0 and "moved to outputs/quickstart-" in done.stdout
    assert [p.read_text() for p in folder.glob("outputs/quickstart-*/metrics.jsonl")] == ["precious"]
    assert calls.read_text().splitlines()[-1] == "torchspec train train_configs/quickstart.toml"


def test_ci_calls_make_test():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "exec make test"
