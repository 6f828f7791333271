"""The recipes of CONTRIBUTING.md, as they stand there, train through the same command from files outside the
package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
trainer = "my/recipe.py:Terse"
device = "cpu"
[policy]
hidden_size = 64
num_layers = 4
num_heads = 2
num_kv_heads = 1
intermediate_size = 96
[draft]
algorithm = "my/draft.py:Scaled"
args = {factor = 0.5}
ttt_steps = 2
[draft.optimizer]
lr = 1e-3
[environment]
name = "my/task.py:Count"
args = {terms = 3}
tokenizer = "char"
eval_items = 2
[eval]
items = 2
[rollout]
max_model_len = 128
kv_cache_mb = 16
max_num_seqs = 8
num_speculative_tokens = 2
[rollout.sampling]
max_tokens = 12
[rl]
prompts_per_step = 2
samples_per_prompt = 2
[train]
steps = 2
tokens_per_microbatch = 256
[warm_start]
steps = 1
batch_size = 2
"""


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.vllm
def test_the_recipes_train_through_the_same_command(tmp_path):
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    recipes = dict(re.findall(r"<!-- (my/\S+\.py) -->\n```python\n(.*?)```", text, flags=re.S))
    assert sorted(recipes) == ["my/draft.py", "my/recipe.py", "my/task.py"]
    (tmp_path / "my").mkdir()
    for name, code in recipes.items():
        (tmp_path / name).write_text(code)
    (tmp_path / "fork.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "torchspec.train", "train", "fork.toml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    out = tmp_path / "outputs" / "fork"
    log = out / "error.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    metrics, samples = rows(out / "metrics.jsonl"), rows(out / "samples.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        # The environment's components are its own, and the trainer's reward is less by 0.001 a token.
        expected = row["reward/right"] + row["reward/brevity"] - 0.001 * row["rollout/length_mean"]
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-9)
        # The draft's loss is half of what its passes say.
        passes = [row[f"draft/loss_pass_{k}"] for k in range(2)]
        assert 0.5 * min(passes) - 1e-6 <= row["draft/loss"] <= 0.5 * max(passes) + 1e-6
    assert samples[0]["prompt"].startswith("count from ")
    for name in ("policy/model.safetensors", "draft/config.json", "report.html", "config.toml"):
        assert (out / name).is_file(), name
