"""Whole runs under torchrun: a pipeline and shards train what replicas do, other ranks go on, a killed rank ends
all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchspec import checkpoint
from torchspec.train import main

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TINY = """
[policy]
hidden_size = 64
num_layers = 4
num_heads = 2
num_kv_heads = 1
head_dim = 32
intermediate_size = 96
max_position_embeddings = 128
optimizer = { lr = 1e-3 }
[draft]
ttt_steps = 2
tap_ids = [1, 2, 4]
optimizer = { lr = 3e-3 }
[environment]
name = "reasoning_gym:spell_backward"
args = { min_word_len = 3, max_word_len = 5 }
tokenizer = "char"
eval_items = 4
[rollout]
num_speculative_tokens = 2
max_model_len = 112
max_num_seqs = 8
kv_cache_mb = 32
sampling = { max_tokens = 10 }
[rl]
prompts_per_step = 4
samples_per_prompt = 4
kl_coef = 0.01
[warm_start]
steps = 2
batch_size = 8
[train]
tokens_per_microbatch = 256
num_threads = 1
[eval]
every = 0
items = 4
[checkpoint]
every = 1
[metrics]
tensorboard = false
"""


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def command(ranks: int, tiny: Path, folder: Path, *overrides: str) -> list[str]:
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += [
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
        ]
        start += ["--rdzv-endpoint", "localhost:0", "--module"]
    return [*start, "torchspec.train", "train", str(tiny), "--output-dir", str(folder), *overrides]


def run(*args: object) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command(*args),  # type: ignore[arg-type]
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


PIPELINE = ("--pipeline.ranks", "2", "--pipeline.schedule", "Interleaved1F1B", "--draft.schedule", "deferred")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> dict:
    """The line of the first step of two ranks that each hold both models."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "tiny.toml").write_text(TINY)
    run(2, folder / "tiny.toml", folder / "run", "--train.steps", "1")
    (line,) = lines(folder / "run")
    return line


@pytest.mark.parity
@pytest.mark.parametrize("how", [PIPELINE, ("--parallelism.shard",)], ids=["pipeline", "sharded"])
def test_ranks_that_share_the_models_train_what_replicas_train_and_one_rank_goes_on(tiny, tmp_path, replicas, how):
    one, shared = replicas, tmp_path / "shared"
    run(2, tiny, shared, "--train.steps", "2", *how)
    first, second = lines(shared)
    assert first.keys() - {"eval/reward_final"} <= one.keys() | second.keys()
    for name in ("reward/mean", "rollout/tokens", "train/tokens"):  # the same engines, seeds and weights
        assert first[name] == one[name], name
    for name in ("policy/loss", "policy/grad_norm", "policy/kl", "draft/loss", "draft/grad_norm", "train/logprob_gap"):
        assert first[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert second["refit/version"] == 2 and second["train/logprob_gap"] < 1e-3  # both engines serve what was trained
    assert main(["export", str(shared), "--to", str(tmp_path / "exported")]) == 0  # by this one process
    for name in ("policy", "draft"):
        ours, theirs = (load_file(folder / name / "model.safetensors") for folder in (shared, tmp_path / "exported"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    run(1, tiny, shared, "--train.steps", "3", "--checkpoint.resume")
    assert [row["step"] for row in lines(shared)] == [1, 2, 3]
    assert lines(shared)[-1]["train/logprob_gap"] < 1e-3


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


@pytest.mark.slow
def test_a_killed_rank_ends_all_of_them_and_the_run_goes_on(tiny, tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(2, tiny, folder, "--train.steps", "500", "--pipeline.ranks", "2"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 300
        while len(checkpoint.complete_steps(folder / "checkpoints")) < 2:
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0][-6000:]
            time.sleep(0.2)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    steps = checkpoint.complete_steps(folder / "checkpoints")
    run(2, tiny, folder, "--train.steps", str(steps[-1] + 1), "--pipeline.ranks", "2", "--checkpoint.resume")
    assert [row["step"] for row in lines(folder)] == list(range(1, steps[-1] + 2))
