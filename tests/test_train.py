"""The command: what it hands over, exit statuses, where tracebacks go, and that nothing already written is
lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchspec.config_file import config_from_toml
from torchspec.train import main, run_folder

TOML = 'device = "cpu"\ntrainer = "mine.py:Mine"\n[environment]\ntokenizer = "char"\n'

TRAINER = """
from pathlib import Path
from torchspec.errors import ConfigError, Interrupted, RunError

class Mine:
    def __init__(self, config, output_dir):
        self.config, self.output_dir = config, output_dir
    def run(self):
        (self.output_dir / "metrics.jsonl").write_text(str(self.config.draft.ttt_steps))
        what = Path("what.txt").read_text() if Path("what.txt").exists() else ""
        if what == "raise KeyboardInterrupt":
            # raised through exec() it would also end pytest's own process at its exit
            raise KeyboardInterrupt
        exec(what, globals())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(TOML)
    (tmp_path / "mine.py").write_text(TRAINER)
    return tmp_path


def test_train_runs_the_trainer_that_the_config_names(folder):
    assert main(["train", "c.toml", "--draft.ttt-steps", "5"]) == 0
    out = folder / "outputs" / "c"
    assert (out / "metrics.jsonl").read_text() == "5"
    config = config_from_toml((out / "config.toml").read_text())
    assert config.draft.ttt_steps == 5 and config.output_dir == "outputs/c"
    assert not (out / "error.log").exists()


@pytest.mark.parametrize(
    "what, status, sentence, log",
    [
        ("raise ConfigError('no such layer.')", 2, "no such layer.", "ConfigError"),
        ("raise RunError('the disk is full.')", 1, "the disk is full.", "RunError"),
        ("raise KeyError('x')", 1, "KeyError: 'x'", "KeyError"),
        ("raise Interrupted('saved; go on with --checkpoint.resume')", 130, "saved; go on", None),
        ("raise KeyboardInterrupt", 130, "Interrupted", None),
    ],
)
def test_errors_are_caught_once(folder, capsys, what, status, sentence, log):
    (folder / "what.txt").write_text(what)
    assert main(["train", "c.toml"]) == status
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err
    path = folder / "outputs" / "c" / "error.log"
    if log is None:
        assert not path.exists()
    else:
        assert log in path.read_text() and "Traceback" in path.read_text() and str(path.relative_to(folder)) in err
        (folder / "what.txt").unlink()
        assert main(["train", "c.toml", "--checkpoint.resume"]) == 0
        assert not path.exists(), "error.log is of the last run only"


def test_a_config_error_leaves_no_folder(folder, capsys):
    assert main(["train", "c.toml", "--rl.samples-per-prompt", "1"]) == 2
    assert "rl.samples_per_prompt = 1" in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_an_earlier_run_is_not_overwritten(folder, capsys):
    assert main(["train", "c.toml"]) == 0
    assert main(["train", "c.toml", "--draft.ttt-steps", "2"]) == 2
    err = capsys.readouterr().err
    assert "already holds a run (metrics.jsonl)" in err and "--checkpoint.resume" in err
    assert (folder / "outputs/c/metrics.jsonl").read_text() == "3"
    assert "ttt_steps = 3" in (folder / "outputs/c/config.toml").read_text()
    assert main(["train", "c.toml", "--output-dir", "outputs/d"]) == 0


def test_two_runs_at_once_in_one_folder(folder):
    (folder / "what.txt").write_text("print('ready', flush=True); import sys; sys.stdin.readline()")
    first = subprocess.Popen(
        [sys.executable, "-m", "torchspec.train", "train", "c.toml"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout.readline() == "TorchSpec: c.toml -> outputs/c\n"
        assert first.stdout.readline() == "ready\n"
        second = subprocess.run(
            [sys.executable, "-m", "torchspec.train", "train", "c.toml", "--checkpoint.resume"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2 and "another run that is still alive" in second.stderr
        first.communicate("go\n", timeout=60)
        assert first.returncode == 0
    finally:
        first.kill()


def test_a_resume_that_fails_leaves_the_settings_of_the_checkpoint(folder):
    assert main(["train", "c.toml", "--draft.ttt-steps", "4"]) == 0
    mark = folder / "outputs/c/checkpoints/step-3/COMPLETE"
    mark.parent.mkdir(parents=True)
    mark.touch()
    resume = ["train", "c.toml", "--checkpoint.resume", "--draft.ttt-steps", "2"]
    (folder / "what.txt").write_text("raise ConfigError('the draft does not fit.')")
    assert main(resume) == 2
    assert "ttt_steps = 4" in (folder / "outputs/c/config.toml").read_text()
    newer = "outputs/c/checkpoints/step-4"
    (folder / "what.txt").write_text(
        f"Path('{newer}').mkdir(); Path('{newer}/COMPLETE').touch(); raise RunError('later.')"
    )
    assert main(resume) == 1
    assert "ttt_steps = 2" in (folder / "outputs/c/config.toml").read_text()


def test_other_ranks_leave_the_folder_to_rank_0(folder, monkeypatch, capsys):
    (folder / "what.txt").write_text("raise RunError('rank 0 is gone.')")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    out = folder / "outputs/c"
    out.mkdir(parents=True)
    (out / "config.toml").write_text("of rank 0")
    (out / "error.log").write_text("of rank 0")
    (out / "samples.jsonl").write_text("")
    assert main(["train", "c.toml"]) == 1
    assert (out / "config.toml").read_text() == (out / "error.log").read_text() == "of rank 0"
    assert "rank 0 is gone" in (out / "error-rank1.log").read_text() and not (out / ".lock").exists()
    captured = capsys.readouterr()
    assert captured.out == "" and "rank 1: rank 0 is gone." in captured.err
    mark = out / "checkpoints/step-3/COMPLETE"
    mark.parent.mkdir(parents=True)
    mark.touch()
    (folder / "what.txt").write_text("raise Interrupted('Stopped.')")
    assert main(["train", "c.toml"]) == 130
    assert "--checkpoint.resume" not in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "c.toml", "--checkpoint.resume"]) == 130
    again = "torchrun --nproc-per-node 2 --module torchspec.train train c.toml --checkpoint.resume\n"
    assert again in capsys.readouterr().err


def test_an_interrupt_prints_the_command_that_goes_on(folder, capsys):
    (folder / "what.txt").write_text("raise Interrupted('Stopped.')")
    args = ["train", "c.toml", "--environment.args.word", "two words"]
    assert main(args) == 130
    assert "--checkpoint.resume" not in capsys.readouterr().err, "there is nothing to go on from"
    mark = folder / "outputs/c/checkpoints/step-3/COMPLETE"
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert main([*args, "--checkpoint.resume"]) == 130
    err = capsys.readouterr().err
    assert "torchspec train c.toml --environment.args.word 'two words' --checkpoint.resume\n" in err


def test_words_on_the_command_line(folder, capsys):
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert main(["train"]) == 2
    assert main(["train", "--draft.ttt-steps", "5"]) == 2
    assert main(["train", "nowhere.toml"]) == 2
    assert main(["eval", "c.toml", "--policy", "nowhere"]) == 2
    assert main(["report", "nowhere"]) == 2
    err = capsys.readouterr().err
    for words in (
        "'trian' is no command",
        "Name a config file first",
        "no config file nowhere.toml",
        "--policy nowhere is not a Hugging Face folder",
        "no run in nowhere",
    ):
        assert words in err


def test_eval_and_export_hand_over(folder, monkeypatch):
    import types

    calls = []
    monkeypatch.setitem(
        sys.modules,
        "torchspec.evaluate",
        types.SimpleNamespace(
            evaluate=lambda config, policy, draft: calls.append((config.draft.ttt_steps, policy, draft))
        ),
    )
    monkeypatch.setitem(
        sys.modules,
        "torchspec.export",
        types.SimpleNamespace(
            export=lambda run_dir, step, to, dtype: calls.append((str(run_dir), step, str(to), dtype))
        ),
    )
    for name in ("p", "d", "outputs/c"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    assert main(["eval", "c.toml", "--policy", "p", "--draft", "d", "--draft.ttt-steps", "4"]) == 0
    assert main(["export", "c.toml", "--step", "7", "--to", "x"]) == 0
    assert main(["export", "outputs/c", "--to", "x", "--dtype", "bfloat16"]) == 0
    assert calls == [(4, "p", "d"), ("outputs/c", 7, "x", "float32"), ("outputs/c", None, "x", "bfloat16")]
    assert str(run_folder("c.toml")) == "outputs/c"
