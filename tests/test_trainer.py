"""Whole runs with the engine: what is written, resume bit-equal, a real SIGINT, plain RL, forks."""

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

from torchspec import checkpoint
from torchspec.config_file import load_config
from torchspec.errors import Interrupted, RunError
from torchspec.trainer import CoTrainer

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
eval_items = 8
[rollout]
num_speculative_tokens = 2
max_model_len = 112
max_num_seqs = 16
kv_cache_mb = 32
sampling = { max_tokens = 10 }
[rl]
prompts_per_step = 4
samples_per_prompt = 4
[train]
steps = 4
tokens_per_microbatch = 512
num_threads = 1
[eval]
every = 2
items = 8
[checkpoint]
every = 3
[metrics]
tensorboard = false
"""

# Fixed by DESIGN section 10; what a run of this config cannot have (a KL, no time spent in ...) is left out.
METRICS = """
reward/mean reward/std policy/lr draft/lr policy/ratio_mean policy/tis_clip_fraction policy/advantage_std
rollout/prompts rollout/length_mean rollout/length_max rollout/truncated_fraction train/logprob_gap_mean
train/engine_kl time/score policy/loss policy/grad_norm policy/entropy policy/kl policy/clip_fraction draft/loss
draft/loss_pass_0 draft/loss_pass_1 draft/grad_norm draft/top1_pass_0 draft/expected_accept_len spec/accept_len
spec/accept_rate spec/accept_rate_pos_0 rollout/tokens rollout/tokens_per_s train/tokens train/logprob_gap
time/rollout time/policy time/draft time/optimizer time/refit time/checkpoint time/step memory/peak_bytes
refit/version skipped/groups skipped/steps
""".split()


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def run(tiny: Path, folder: Path, *overrides: str, trainer=CoTrainer) -> CoTrainer:
    config = load_config(tiny, ["--output-dir", str(folder), *overrides])
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(tiny.read_text())
    made = trainer(config, folder)
    made.run()
    return made


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def untimed(row: dict) -> dict:
    machine = ("time/", "memory/", "rollout/tokens_per_s")
    return {key: value for key, value in row.items() if not key.startswith(machine)}


class StopsInStepThree(CoTrainer):
    """Is told to stop in the middle of step 3's rollout."""

    def rollout(self, step):
        if step == 3:
            self.stop.signal = "SIGINT"
        return super().rollout(step)


def test_interrupted_and_resumed_is_bit_equal_to_uninterrupted(tiny, tmp_path):
    run(tiny, tmp_path / "straight")
    with pytest.raises(Interrupted, match="after step 2 of 4"):
        run(tiny, tmp_path / "halved", trainer=StopsInStepThree)
    assert checkpoint.complete_steps(tmp_path / "halved" / "checkpoints") == [0, 2]
    # Lines of steps that no checkpoint holds must go.
    with open(tmp_path / "halved" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward/mean": 7}\n')
    run(tiny, tmp_path / "halved", "--checkpoint.resume")
    a, b = (checkpoint.load_checkpoint(tmp_path / name / "checkpoints") for name in ("straight", "halved"))
    torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert [untimed(r) for r in lines(tmp_path / "straight")] == [untimed(r) for r in lines(tmp_path / "halved")]
    assert lines(tmp_path / "straight", "samples.jsonl") == lines(tmp_path / "halved", "samples.jsonl")
    for model in ("policy", "draft"):
        files = [tmp_path / name / model / "model.safetensors" for name in ("straight", "halved")]
        assert files[0].read_bytes() == files[1].read_bytes()
    check_outputs(tmp_path / "straight")


class StopsInTheLastEvaluation(CoTrainer):
    """Is told to stop when the last step has been trained and its evaluation begins."""

    def evaluate(self):
        if self.step == self.config.train.steps:
            self.stop.signal = "SIGINT"
        return super().evaluate()


def test_a_stop_in_the_last_evaluation_keeps_the_step_that_was_trained(tiny, tmp_path):
    short = ("--train.steps", "2", "--checkpoint.every", "0")
    run(tiny, tmp_path / "straight", *short)
    with pytest.raises(Interrupted, match="after step 2 of 2"):
        run(tiny, tmp_path / "stopped", *short, trainer=StopsInTheLastEvaluation)
    a, b = (checkpoint.load_checkpoint(tmp_path / name / "checkpoints") for name in ("straight", "stopped"))
    assert a["step"] == b["step"] == 2 and a["cursor"] == b["cursor"]
    assert all(torch.equal(b["learner"]["policy"][name], w) for name, w in a["learner"]["policy"].items())
    last, stopped = lines(tmp_path / "straight")[-1], lines(tmp_path / "stopped")[-1]
    assert stopped["step"] == 2 and untimed(stopped).items() <= untimed(last).items()


def test_items_without_answers_and_a_held_out_prompt_that_is_too_long(tiny, tmp_path):
    rows = [{"prompt": f"say {i} " + "x" * (120 if i % 5 == 0 else 0)} for i in range(40)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text("def score(prompt, response, answer, row):\n    return len(response) % 2\n")
    tiny.write_text(
        tiny.read_text()
        .replace('name = "reasoning_gym:spell_backward"', f'name = "jsonl"\npath = "{tmp_path / "items.jsonl"}"')
        .replace("args = { min_word_len = 3, max_word_len = 5 }", f'scorer = "{tmp_path / "own.py"}:score"')
    )
    run(tiny, tmp_path / "run", "--train.steps", "1")
    (row,) = lines(tmp_path / "run")
    assert row["skipped/prompts"] > 0 and 0 <= row["eval/reward"] <= 1 and row["draft/loss"] > 0


def check_outputs(folder: Path) -> None:
    rows = lines(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sorted(set(METRICS) - set(rows[0])) == []
    assert all("eval/reward" in rows[i] for i in (0, 2, 3)) and "eval/reward" not in rows[1]
    # A step whose groups were all dropped has no trained token to compare.
    gaps = [row["train/logprob_gap"] for row in rows if "train/logprob_gap" in row]
    assert gaps and max(gaps) < 1e-4
    assert [row["refit/version"] for row in rows] == [1, 2, 3, 4]
    assert {"prompt", "response", "reward", "components", "advantage", "finish_reason", "seed"} <= set(
        lines(folder, "samples.jsonl")[0]
    )
    assert "<svg" in (folder / "report.html").read_text()


def test_plain_rl_without_a_draft(tiny, tmp_path):
    folder = tmp_path / "plain"
    run(tiny, folder, "--draft.no-enabled", "--rollout.num-speculative-tokens", "0", "--train.steps", "2")
    assert len(lines(folder)) == 2 and not (folder / "draft").exists()
    assert not any(key.startswith(("draft/", "spec/")) for key in lines(folder)[-1])


def test_nan_is_fatal_after_the_limit_and_keeps_the_last_finite_weights(tiny, tmp_path):
    class Breaks(CoTrainer):
        def update(self, step, rollout):
            if step == 2:
                with torch.no_grad():
                    for sample in rollout.samples:
                        sample.advantage = float("nan")
            return super().update(step, rollout)

    with pytest.raises(RunError, match="NaN or Inf"):
        run(tiny, tmp_path / "nan", "--train.max-skipped-steps", "0", "--checkpoint.every", "1", trainer=Breaks)
    state = checkpoint.load_checkpoint(tmp_path / "nan" / "checkpoints")
    assert state["step"] == 1
    assert all(torch.isfinite(w).all() for w in state["learner"]["policy"].values())


def test_a_run_whose_last_steps_were_skipped_is_no_success(tiny, tmp_path):
    with pytest.raises(RunError, match="The last 2 of 3 steps were skipped"):
        run(tiny, tmp_path / "ruined", "--policy.optimizer.lr", "1e30", "--train.steps", "3", "--eval.every", "0")
    assert lines(tmp_path / "ruined")[-1]["skipped/steps"] == 2


def wait_for(condition, seconds: float, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_saves_prints_the_command_and_ends_with_130(tiny, tmp_path, number):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torchspec.train", "train", str(tiny), "--output-dir", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--train.steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and lines(folder), 300, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "--checkpoint.resume" in errors and "after step" in errors
    done = checkpoint.complete_steps(folder / "checkpoints")[-1]
    assert done == lines(folder)[-1]["step"]
    if number == signal.SIGINT:
        resumed = subprocess.run(
            [*command, "--train.steps", str(done + 1), "--checkpoint.resume"],
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
        )
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert [row["step"] for row in lines(folder)] == list(range(1, done + 2))
