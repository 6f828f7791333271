"""Settings: read strictly, overlaid, written back exactly; wrong ones refused with the nearest right name."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time

import pytest

from torchspec.config import Config
from torchspec.config_file import config_from_toml, config_to_toml, load_config, overlay, setting_names
from torchspec.errors import ConfigError

BASE = '[environment]\ntokenizer = "char"\n'


@pytest.mark.parametrize(
    "toml, words",
    [
        ("[draft]\nttt_step = 5", ["draft.ttt_step is not a setting", "Did you mean draft.ttt_steps?"]),
        ("ttt_steps = 5", ["ttt_steps is not a setting", "Did you mean draft.ttt_steps?"]),
        ("[drafts]\nttt_steps = 5", ["drafts is not a setting", "Did you mean draft?"]),
        ("[rollout]\ntemperature = 1.0", ["rollout.sampling.temperature"]),
        ("[draft.optimizer]\nlearning_rate = 1.0", ["draft.optimizer.learning_rate is not a setting"]),
        ('[draft]\nttt_steps = "5"', ['draft.ttt_steps = "5"', "a whole number", "Write 5 without quotes"]),
        ("[draft]\nttt_steps = 4.5", ["draft.ttt_steps = 4.5", "a whole number"]),
        ("[draft]\nttt_steps = true", ["draft.ttt_steps = true", "a whole number"]),
        ('[draft]\nenabled = "true"', ["draft.enabled", "true or false", "without quotes"]),
        ("[draft]\ntap_ids = 3", ["draft.tap_ids = 3", "a list"]),
        ('[draft]\ntap_ids = [1, "a"]', ['draft.tap_ids.1 = "a"', "a whole number"]),
        ("[draft.optimizer]\nbetas = [0.9]", ["draft.optimizer.betas = [0.9]", "too few"]),
        ("[draft.optimizer]\nbetas = [0.9, 0.9, 0.9]", ["draft.optimizer.betas"]),
        ("draft = 3", ["draft = 3", "[draft]"]),
        ('device = "gpu"', ['device = "gpu"', "'auto', 'cpu' or 'cuda'"]),
        ("[rl]\nclip_low = nan", ["rl.clip_low = nan is not a finite number"]),
        ("[environment.args]\nday = 2026-01-01", ["environment.args.day", "date"]),
        ("[draft\n", ["not valid TOML"]),
    ],
)
def test_wrong_toml_is_refused_by_name(toml, words):
    with pytest.raises(ConfigError) as caught:
        config_from_toml(toml, "my.toml")
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "my.toml" in str(caught.value)


def test_all_faults_are_told_together():
    with pytest.raises(ConfigError) as caught:
        config_from_toml('sed = 3\n[draft]\nttt_steps = "5"\n')
    assert len(str(caught.value).splitlines()) == 2


def test_overrides_reach_every_kind_of_setting(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(BASE + "[environment.args]\nmin_word_len = 3\n[rollout.sampling]\nmax_tokens = 20\n")
    config = load_config(
        path,
        [
            "--draft.ttt-steps",
            "2",
            "--checkpoint.resume",
            "--draft.tap-ids",
            "1",
            "2",
            "--draft.pass_weights",
            "1",
            "0.5",
            "--policy.optimizer.lr",
            "1e-5",
            "--device",
            "cpu",
            "--metrics.no-tensorboard",
            "--environment.args.min-word-len",
            "4",
            "--environment.args.new-key",
            "[1, 2.5]",
            "--environment.args.word=plain text",
            "--draft.args.flag",
            "true",
        ],
    )
    assert config.draft.ttt_steps == 2 and config.checkpoint.resume is True
    assert config.draft.tap_ids == (1, 2) and config.draft.pass_weights == (1.0, 0.5)
    assert config.policy.optimizer.lr == 1e-5 and config.device == "cpu" and config.metrics.tensorboard is False
    assert config.environment.args == {"min_word_len": 4, "new_key": [1, 2.5], "word": "plain text"}
    assert config.draft.args == {"flag": True}
    assert config.rollout.sampling.max_tokens == 20, "what is not overridden stays as the file says"
    assert config.output_dir == "outputs/mine"


def test_wrong_flags_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        overlay(Config(), ["--draft.ttt-step", "5"])
    assert caught.value.code == 2 and "--draft.ttt-steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        overlay(Config(), ["--draft.ttt-steps", "five"])
    with pytest.raises(ConfigError, match="finite"):
        overlay(Config(), ["--rl.clip-low", "nan"])
    with pytest.raises(ConfigError, match="needs a value"):
        overlay(Config(), ["--draft.args.x"])


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(ConfigError, match="quickstart.toml"):
        load_config(tmp_path / "quikstart.toml")


def _shuffled(kind, rng):
    """A config whose every setting has a random value of its type."""
    import typing

    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = _shuffled(hint, rng)
        elif typing.get_origin(hint) is typing.Literal:
            values[field.name] = rng.choice(typing.get_args(hint))
        elif hint is bool:
            values[field.name] = rng.random() < 0.5
        elif hint is int:
            values[field.name] = rng.randrange(-10, 2**40)
        elif hint is float:
            values[field.name] = rng.choice([rng.gauss(0, 1), 10.0 ** rng.randrange(-300, 300), 1.0, 1e16, 0.1 + 0.2])
        elif hint is str:
            values[field.name] = "".join(rng.choice("ab \"'\\\n\t\x01\x7f\u00e9\U0001f600=#[") for _ in range(8))
        elif field.name in ("betas",):
            values[field.name] = (rng.random(), rng.random())
        elif typing.get_origin(hint) is tuple:
            inner = typing.get_args(hint)[0]
            values[field.name] = tuple(inner(rng.randrange(99)) for _ in range(rng.randrange(4)))
        elif field.name == "logit_bias":
            values[field.name] = {"a b": rng.random(), "": 1.0, '"q\n': -2.0}
        else:
            values[field.name] = {
                "plain": 1,
                "sp ace.dot": [1, "x", [2.5, True], {"k": {}}],
                "t": {"\u00e9": False},
                "e": [],
            }
    return kind(**values)


def test_what_is_written_reads_back_equal():
    rng = random.Random()
    for _ in range(20):
        config = _shuffled(Config, rng)
        assert config_from_toml(config_to_toml(config)) == config
    assert config_to_toml(config_from_toml(config_to_toml(config))) == config_to_toml(config)


def test_what_toml_cannot_say_is_refused():
    config = Config()
    config.draft.args = {"f": print}
    with pytest.raises(ConfigError, match="cannot be written"):
        config_to_toml(config)


def test_every_setting_is_named_and_documented():
    names = setting_names()
    assert len(names) == len(set(names)) > 80
    assert {"seed", "draft", "draft.optimizer.lr", "rollout.sampling.top_p"} <= set(names)


def test_help_is_quick_and_loads_no_torch(tmp_path):
    (tmp_path / "c.toml").write_text(BASE + "[draft]\nttt_step = 3\n")
    code = (
        "import sys\nfrom torchspec.train import main\n"
        "try: status = main(sys.argv[1:])\nexcept SystemExit as e: status = e.code or 0\n"
        "heavy = {'torch', 'vllm', 'transformers', 'torchtitan', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(status)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, "train", "--help"], capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    assert "--draft.ttt-steps INT" in done.stdout and "Passes K of the unroll" in done.stdout
    assert seconds < 5, "far above the second that it should take, to stand a busy machine"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(tmp_path / "c.toml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "Did you mean draft.ttt_steps?" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value, expected", [("false", False), ("False", False), ("true", True), ("True", True)])
@pytest.mark.parametrize("equals", [False, True])
def test_a_switch_takes_a_word_too(value, expected, equals):
    flag = "--policy.tie-word-embeddings"
    config = overlay(Config(), [f"{flag}={value}"] if equals else [flag, value])
    assert config.policy.tie_word_embeddings is expected
    assert overlay(Config(), ["--draft.enabled", value, "--train.steps", "3"]).draft.enabled is expected
