"""What needs no vLLM: seeds, limits, statistics, the census, sharing the process, and the repair's arithmetic."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy
import pytest
import torch
from safetensors.torch import save_file

from torchspec.errors import ConfigError, Interrupted, RunError
from torchspec.rollout import process, sampler_fix, transfer
from torchspec.rollout.config import SamplingConfig
from torchspec.rollout.engine import (
    EngineError,
    RolloutDeadline,
    RolloutInterrupted,
    SpecStats,
    check_sampling,
    generation_stop_ids,
    request_seed,
    response_room,
)


def test_the_protocol_needs_neither_torch_nor_vllm():
    heavy = "('torch', 'vllm', 'transformers')"
    code = f"import sys, torchspec.rollout.engine; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_the_engine_module_pulls_neither_vllm_nor_transformers():
    code = "import sys, torchspec.rollout.vllm; print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_errors_end_a_run_as_they_should():
    assert issubclass(EngineError, RunError) and issubclass(RolloutDeadline, RunError)
    assert issubclass(RolloutInterrupted, Interrupted)


def test_request_seeds_are_fixed_and_all_different():
    assert request_seed(0, 1, 2, 3) == 512300646610042883  # a resumed run must draw what the first run drew
    seeds = {request_seed(r, t, p, s) for r in range(3) for t in range(10) for p in range(20) for s in range(8)}
    assert len(seeds) == 3 * 10 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, 11, 1, 1) != request_seed(11, 1, 1, 1) != request_seed(1, 1, 11, 1)


@pytest.mark.parametrize(
    "prompt, max_tokens, drafted, room",
    [
        (10, 20, 3, 20),  # fits
        (10, 60, 3, 50),  # 64 - 10 - (3 + 1)
        (10, 60, 0, 54),  # no speculation: no lookahead
        (59, 60, 3, 1),
        (60, 60, 3, 0),
        (64, 60, 0, 0),
        (70, 5, 3, -10),
    ],
)
def test_response_room(prompt, max_tokens, drafted, room):
    assert response_room(prompt, max_tokens, 64, drafted) == room


def test_spec_stats_subtract():
    late, early = SpecStats(10, 30, 12, [8, 3, 1]), SpecStats(4, 12, 3, [2, 1, 0])
    assert late - early == SpecStats(6, 18, 9, [6, 2, 1])
    assert late - SpecStats() == late
    other = late.copy()
    other.accepted_per_pos[0] += 1
    assert late.accepted_per_pos == [8, 3, 1]


@pytest.mark.parametrize(
    "bad",
    [
        dict(min_p=0.1),
        dict(logit_bias={"1": 2.0}),
        dict(temperature=-1.0),
        dict(temperature=2.1),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(top_k=-1),
        dict(max_tokens=0),
    ],
)
def test_sampling_out_of_range(bad):
    check_sampling(SamplingConfig())
    with pytest.raises(ConfigError):
        check_sampling(SamplingConfig(**bad))


def test_stop_ids_of_a_folder(tmp_path):
    assert generation_stop_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert generation_stop_ids(tmp_path) == (7,)
    for value, ids in ((3, (3,)), ([9, 4, 9], (4, 9)), (None, ())):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert generation_stop_ids(tmp_path) == ids
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(EngineError, match="generation_config.json cannot be read"):
        generation_stop_ids(tmp_path)


# -- the census ---------------------------------------------------------------------------------------------------


def test_census_names_every_fault_in_one_sentence():
    contract = {"a": (2, 3), "b": (4,), "c": (1,)}
    good = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4)), ("c", torch.zeros(1)), ("t2d", torch.zeros(9))]
    assert [name for name, _ in transfer.check_census("draft", iter(good), contract)] == ["a", "b", "c"]
    bad = [("a", torch.zeros(3, 2)), ("b", torch.zeros(4)), ("b", torch.zeros(4)), ("d", torch.zeros(1))]
    with pytest.raises(EngineError) as raised:
        transfer.check_census("draft", bad, contract)
    for words in (
        "c is missing",
        "d is unknown",
        "a has shape [3, 2] instead of [2, 3]",
        "b comes twice",
        "Nothing was sent",
    ):
        assert words in str(raised.value)
    with pytest.raises(EngineError, match="t0, t1, t2, t3, t4, t5 and 14 more are missing"):
        transfer.check_census("policy", [], {f"t{i:01x}" if i < 6 else f"u{i}": (1,) for i in range(20)})


def test_a_tied_head_is_added_once_and_must_be_the_embedding():
    embed = torch.randn(5, 2)
    name = "model.embed_tokens.weight"
    assert [n for n, _ in transfer.with_tied_head([(name, embed)])] == [name, "lm_head.weight"]
    assert [n for n, _ in transfer.with_tied_head([(name, embed), ("lm_head.weight", embed.clone())])] == [
        name,
        "lm_head.weight",
    ]
    with pytest.raises(EngineError, match="tied"):
        transfer.with_tied_head([(name, embed), ("lm_head.weight", embed + 1)])
    assert transfer.with_tied_head([]) == []  # left to the census


def test_shapes_are_read_from_every_file_of_the_index(tmp_path):
    save_file({"a": torch.zeros(2, 3), "t2d": torch.zeros(4)}, str(tmp_path / "one.safetensors"))
    save_file({"b": torch.zeros(4)}, str(tmp_path / "two.safetensors"))
    save_file({"old": torch.zeros(4)}, str(tmp_path / "stray.safetensors"))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert transfer.read_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
    (tmp_path / "two.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineError, match="two.safetensors is not a readable safetensors file"):
        transfer.read_shapes(tmp_path)
    with pytest.raises(EngineError, match="no .*safetensors"):
        transfer.read_shapes(tmp_path / "nowhere")


@pytest.mark.parametrize("equal", ["", "lm_head.weight", "embed_tokens.weight"])
def test_a_draft_equal_to_the_policy_in_head_or_embedding_is_loaded_from_a_twin(tmp_path, equal):
    policy = {"lm_head.weight": torch.randn(6, 4), "model.embed_tokens.weight": torch.randn(6, 4)}
    draft = {
        "lm_head.weight": torch.randn(6, 4),
        "embed_tokens.weight": torch.randn(6, 4),
        "norm.weight": torch.randn(4),
    }
    if equal:  # equal in bfloat16, in which the engine compares
        source = policy["lm_head.weight" if equal == "lm_head.weight" else "model.embed_tokens.weight"]
        draft[equal] = source.bfloat16().float()
    for name, tensors in (("policy", policy), ("draft", draft)):
        (tmp_path / name).mkdir()
        save_file(tensors, str(tmp_path / name / "model.safetensors"))
        (tmp_path / name / "config.json").write_text("{}")
    with transfer.loadable_draft(tmp_path / "policy", tmp_path / "draft", torch.bfloat16) as folder:
        assert (folder != tmp_path / "draft") == bool(equal)
        loaded = dict(transfer.read_weights(folder))
        assert (folder / "config.json").is_file()
    for name, tensor in draft.items():
        different = (loaded[name].bfloat16() != tensor.bfloat16()).nonzero().tolist()
        assert different == ([[0, 0]] if name == equal else [])
    assert folder.exists() == (not equal)


# -- sharing the process ------------------------------------------------------------------------------------------


def test_undisturbed_gives_everything_back(monkeypatch):
    monkeypatch.setenv("TORCHSPEC_TEST_KEPT", "before")
    monkeypatch.setenv("VLLM_TEST_SETTING", "before")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    hook, setter, threads = sys.excepthook, torch.set_num_threads, torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        with process.undisturbed():
            torch.manual_seed(0)
            random.seed(0)
            numpy.random.seed(0)
            torch.set_num_threads(threads + 1)
            torch.set_num_threads = lambda count: None
            sys.excepthook = print
            os.environ.update(TORCHSPEC_TEST_NEW="1", TORCHSPEC_TEST_KEPT="after", VLLM_TEST_SETTING="after")
            raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert numpy.random.get_state()[1].tolist() == states[2]
    assert (sys.excepthook, torch.set_num_threads, torch.get_num_threads()) == (hook, setter, threads)
    assert "TORCHSPEC_TEST_NEW" not in os.environ and os.environ["TORCHSPEC_TEST_KEPT"] == "before"
    assert os.environ["VLLM_TEST_SETTING"] == "after"


def test_thread_count_is_switched_and_switched_back():
    before = torch.get_num_threads()
    with process.num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with process.num_threads(0):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_the_user_may_turn_vllms_log_up_but_not_move_the_engine_out(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    process.set_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_only_known_noise_is_removed(capfd):
    with process.known_noise_removed("NUMA"):
        os.write(2, b"Warning: NUMA binding\nsomething else\n")
        print("to stdout")
    captured = capfd.readouterr()
    assert captured.err == "something else\n" and captured.out == "to stdout\n"


# -- the repair of the sampler ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_expand_against_a_loop(dtype):
    counts = [2, 0, 3, 1, 0]
    values = torch.tensor([5, 1, 0, 7, 5]).to(dtype)
    cumulative = torch.tensor(counts).cumsum(0).to(torch.int32)
    output = torch.full((6,), 99).to(dtype)
    sampler_fix.expand(output, values, cumulative, 0, 1)
    expected = [(1 if value == 0 else value) for value, count in zip(values.tolist(), counts) for _ in range(count)]
    assert output.tolist() == expected
    assert not sampler_fix.is_faulty(sampler_fix.expand)
    assert sampler_fix.is_faulty(lambda *arguments: None)
