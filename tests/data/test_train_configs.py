"""The configs that come with the project are valid, and the environments that they name can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchspec.config_file import config_from_toml
from torchspec.data.environments import build_environment, score_all
from torchspec.validation import validate

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_config_is_valid_and_its_environment_scores_its_own_answers(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_from_toml(file.read_text(), str(file))
    validate(config, check_files=False)
    assert config.eval.items <= config.environment.eval_items
    config.environment.args.pop("careless", None)  # the quickstart's teacher errs on purpose
    environment = build_environment(config.environment, config.seed)
    items = [environment.item(i, split) for i in range(4) for split in ("train", "eval")]
    batch = score_all(environment, [(item, item.answer) for item in items])
    assert batch.failed == 0 and batch.rewards == pytest.approx([1.0] * len(items))


def test_the_configs_that_the_issues_name_are_there():
    assert {"quickstart", "smollm2_135m", "qwen3_gpu"} <= {file.stem for file in CONFIGS}


def test_counting_has_a_slope(monkeypatch):
    from torchspec.data.config import EnvironmentConfig

    monkeypatch.chdir(ROOT)
    name = "train_configs/environments/counting.py:Counting"
    environment = build_environment(EnvironmentConfig(name=name, args={"numbers": 10}, eval_items=2), 0)
    item = environment.item(0, "train")
    numbers = item.row["wanted"]
    rewards = []
    for right in range(11):
        line = ", ".join(str(n) for n in numbers[:right]) or "none"
        rewards.append(sum(environment.score(item, line).values()))
    assert rewards == sorted(set(rewards)) and rewards[0] == 0.0 and rewards[-1] == pytest.approx(1.0)
    assert sum(environment.score(item, f"Here: {item.answer}").values()) == pytest.approx(0.8)
    running_on = item.answer + "".join(f", {numbers[-1] + i}" for i in range(10))
    assert sum(environment.score(item, running_on).values()) == pytest.approx(0.4 + 0.2)
    one_missing = ", ".join(str(n) for n in numbers[:4] + numbers[5:])
    assert sum(environment.score(item, one_missing).values()) == pytest.approx(0.72 + 0.2)
    out_of_order = ", ".join(str(n) for n in numbers[::-1])
    assert sum(environment.score(item, out_of_order).values()) == pytest.approx(0.08 + 0.2)
