"""report.html: one page that needs nothing else, shows what the run has, and lets no sampled text act as
HTML."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET

import pytest

from torchspec.config import Config
from torchspec.config_file import config_to_toml
from torchspec.errors import RunError
from torchspec.metrics import read_rows
from torchspec.report import duration, plot_reward, running_mean, write_report


def a_run(folder, steps: int, draft: bool = True) -> None:
    config = Config()
    config.draft.ttt_steps = 5
    config.environment.args = {"note": "<script>alert(1)</script>"}
    (folder / "config.toml").write_text(config_to_toml(config))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "reward/mean": 0.1 + step / 100,
                "policy/entropy": random.random(),
                "policy/kl": None,
                "policy/grad_norm": random.random() + 0.1,
                "train/logprob_gap": 10.0 ** -random.randrange(4, 7),
                "rollout/tokens_per_s": 1000.0,
                "rollout/tokens": 50,
                "time/rollout": 1.0,
                "time/policy": 2.0,
                "time/step": 65.0,
            }
            if draft:
                row |= {
                    "spec/accept_len": 2.0,
                    "spec/accept_rate_pos_0": 0.5,
                    "draft/loss": 1.0,
                    "draft/loss_pass_0": 1.0,
                    "draft/loss_pass_11": 2.0,
                    "draft/top1_pass_0": 0.5,
                }
            if step in (1, steps):
                row["eval/reward"] = step / 10
            file.write(json.dumps(row) + "\n")
    sample = {
        "prompt": [{"role": "user", "content": "<b>hi"}],
        "response": "</td><img src=x onerror=alert(1)>",
        "reward": 1.0,
        "drafts": 4,
        "accepted": 6,
        "answer": "x",
    }
    (folder / "samples.jsonl").write_text(
        "".join(
            json.dumps({"step": step, **sample, "response": f"{sample['response']} of {step}"}) + "\n"
            for step in (1, steps)
        )
    )


@pytest.mark.parametrize("steps", [1, 50])
def test_a_page_of_its_own(tmp_path, steps):
    a_run(tmp_path, steps)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html" and not list(tmp_path.glob(".report*"))
    text = path.read_text()
    for title in (
        "Reward",
        "Acceptance length",
        "Acceptance by position",
        "Draft loss",
        "Rollout speed",
        "Seconds per phase",
        "Log-probability gap, engine against trainer",
        "Gradient norms, before clipping",
    ):
        assert f'aria-label="{title}"' in text, title
    assert not re.search(r'(src|href)\s*=\s*"?https?:', text) and "<script" not in text and "<img" not in text
    assert "&lt;script&gt;" in text and "&lt;img src=x onerror=alert(1)&gt; of " + str(steps) in text
    if steps > 1:
        assert "&gt; of 1<" not in text, "only the last step's samples"
        assert f"0.100 &rarr; {steps / 10:.3f}" in text
    assert "<tr class=changed><td>ttt_steps</td><td>5</td></tr>" in text
    assert "<tr><td>seed</td><td>0</td></tr>" in text
    assert ">2.50</td>" in text, "1 + accepted/drafts of a sample"
    figures = re.findall(r"<figure>(.*?)</figure>", text, flags=re.S)
    assert len(figures) >= 9
    ids = []
    for svg in figures:
        tree = ET.fromstring(svg)  # each is whole by itself
        ids += [node.get("id") for node in tree.iter() if node.tag.endswith("clipPath")]
        assert "var(--ink)" in svg and "#010203" not in svg
    assert len(ids) == len(set(ids)), "clip paths of one plot must not answer for another's"


def test_a_run_without_a_draft_shows_no_empty_plots(tmp_path):
    a_run(tmp_path, 5, draft=False)
    text = write_report(tmp_path).read_text()
    assert 'aria-label="Reward"' in text
    for title in ("Draft loss", "Acceptance"):
        assert f'aria-label="{title}' not in text


def test_it_can_be_written_at_any_time(tmp_path):
    assert "No step has been finished yet" in write_report(tmp_path).read_text()
    a_run(tmp_path, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # being written right now
    assert "TorchSpec, 3 steps" in write_report(tmp_path).read_text()


def test_a_broken_log_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('nonsense\n{"step": 1}\n')
    with pytest.raises(RunError, match="line 1"):
        write_report(tmp_path)


def test_the_same_run_gives_the_same_plot(tmp_path):
    a_run(tmp_path, 4)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert plot_reward(rows) == plot_reward(rows) != plot_reward(rows[:3])


def test_small_parts():
    assert running_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert [duration(s) for s in (3.4, 61, 3600 + 5 * 60 + 3)] == ["3 s", "1 min 01 s", "1 h 05 min"]
