"""The engine: seeds, order, limits, interruption, statistics, and what it leaves of the process."""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from tiny_models import draft_for, hf_logprobs, make_policy, write_draft

from torchspec.errors import ConfigError
from torchspec.rollout.config import RolloutConfig, SamplingConfig
from torchspec.rollout.engine import EngineError, Request, RolloutDeadline, RolloutInterrupted, SpecStats, request_seed
from torchspec.rollout.vllm import VllmEngine

pytestmark = pytest.mark.vllm
V, EOS, CONTEXT, K = 40, [39, 38], 192, 3
CONFIG = dict(kv_cache_mb=16, max_model_len=CONTEXT, max_num_seqs=8, num_speculative_tokens=K)
CRAMPED = CONFIG | dict(kv_cache_mb=1, max_num_seqs=24)  # 4 blocks of 128 tokens; a long response needs 2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    policy = make_policy(folder / "policy", vocab=V, tied=False, seed=21, eos=EOS)
    write_draft(folder / "draft", draft_for(policy, vocab=V, seed=22), vocab=V)
    return policy, folder


def process_state() -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return dict(
        torch=torch.get_rng_state().tolist(),
        python=random.getstate(),
        numpy=numpy.random.get_state()[1].tolist(),
        environment=environment,
        hook=sys.excepthook,
        setter=torch.set_num_threads,
        threads=torch.get_num_threads(),
        grad=torch.is_grad_enabled(),
        dtype=torch.get_default_dtype(),
    )


@dataclass
class Others:
    """What engines before the main one did; a process can hold one engine at a time."""

    process_change: dict = field(default_factory=dict)
    greedy_alone: list = field(default_factory=list)
    sampled_cramped: list = field(default_factory=list)


@pytest.fixture(scope="module")
def others(models):
    policy, folder = models
    result = Others()
    torch.manual_seed(1234)
    before = process_state()
    with VllmEngine(folder / "policy", None, RolloutConfig(**CONFIG)) as plain:
        after = process_state()
        result.process_change = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
        with pytest.raises(EngineError, match="only one at a time"):
            VllmEngine(folder / "policy", None, RolloutConfig(**CONFIG))
        plain.refit(list(policy.state_dict().items()), [("not.looked.at", torch.zeros(1))], 1)
        result.greedy_alone = plain.generate(
            some_requests(6), SamplingConfig(temperature=0.0, max_tokens=20), deadline_s=300
        )
        assert plain.spec_stats() == SpecStats() and plain.num_speculative_tokens == 0
    with pytest.raises(EngineError, match="closed"):
        plain.generate([Request([1], 7)], SamplingConfig(), deadline_s=1)
    with VllmEngine(folder / "policy", folder / "draft", RolloutConfig(**CRAMPED)) as cramped:
        result.sampled_cramped = cramped.generate(some_requests(24), SamplingConfig(max_tokens=150), deadline_s=300)
    return result


@pytest.fixture(scope="module")
def engine(models, others):
    _, folder = models
    with VllmEngine(folder / "policy", folder / "draft", RolloutConfig(**CONFIG)) as engine:
        yield engine


def some_requests(count: int, run_seed: int = 3) -> list[Request]:
    return [
        Request([(7 * i + j) % 30 for j in range(2 + i % 5)], request_seed(run_seed, 1, i, 0)) for i in range(count)
    ]


def rows(completions) -> list[tuple]:
    return [(c.token_ids, c.finish_reason) for c in completions]


def test_construction_leaves_the_process_as_it_was(others):
    assert others.process_change == {}


def test_a_rollout_leaves_randomness_and_threads_alone(engine):
    before = process_state()
    engine.generate(some_requests(3), SamplingConfig(max_tokens=4), deadline_s=300)
    assert process_state() == before


def test_greedy_with_speculation_equals_without_and_equals_hugging_face(engine, models, others):
    policy, _ = models
    requests = some_requests(6)
    sampling = SamplingConfig(temperature=0.0, max_tokens=20)
    before = engine.spec_stats()
    completions = engine.generate(requests, sampling, deadline_s=300)
    assert (engine.spec_stats() - before).accepted > 0
    assert rows(completions) == rows(others.greedy_alone)
    for request, completion in zip(requests, completions):
        expected = hf_greedy(policy, request.prompt_ids, 20)
        assert completion.token_ids == expected
        oracle = hf_logprobs(policy, request.prompt_ids, completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), oracle, rtol=0, atol=2e-5)


@torch.no_grad()
def hf_greedy(policy, prompt: list[int], limit: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit and (len(tokens) == len(prompt) or tokens[-1] not in EOS):
        tokens.append(policy(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


def test_a_request_draws_its_own_tokens_whatever_runs_beside_it(engine):
    requests = some_requests(20)  # more than max_num_seqs = 8
    sampling = SamplingConfig(max_tokens=16)
    together = engine.generate(requests, sampling, deadline_s=300)
    backwards = engine.generate(requests[::-1], sampling, deadline_s=300)[::-1]
    alone = [engine.generate([request], sampling, deadline_s=300)[0] for request in requests[:6]]
    assert rows(together) == rows(backwards)
    assert rows(together[:6]) == rows(alone)
    assert len({tuple(c.token_ids) for c in together}) > 10
    for one, other in zip(together, backwards):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    other_seeds = engine.generate(some_requests(20, run_seed=4), sampling, deadline_s=300)
    assert rows(other_seeds) != rows(together)


def test_a_small_kv_cache_changes_no_tokens(engine, others):
    """Requests that do not fit at once wait, or are preempted and computed again."""
    roomy = engine.generate(some_requests(24), SamplingConfig(max_tokens=150), deadline_s=300)
    assert rows(roomy) == rows(others.sampled_cramped)


def test_end_tokens_end_a_response_and_belong_to_it(engine):
    sampling = SamplingConfig(temperature=2.0, max_tokens=40, stop_token_ids=(5,))
    completions = engine.generate(some_requests(150), sampling, deadline_s=300)
    ends = {5, *EOS}
    for completion in completions:
        assert not ends & set(completion.token_ids[:-1])
        assert len(completion.logprobs) == len(completion.token_ids)
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in ends
        else:
            assert completion.token_ids[-1] not in ends and len(completion.token_ids) == 40
    seen = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert seen == ends, "each kind of end token should have come up"


def test_length_is_cut_so_that_the_lookahead_fits(engine):
    for length in (CONTEXT - K - 1 - 1, CONTEXT - K - 1 - 5):
        room = CONTEXT - K - 1 - length
        assert engine.longest_response(length, 100) == room
        [completion] = engine.generate(
            [Request([1] * length, 7)], SamplingConfig(temperature=0.0, max_tokens=100), deadline_s=300
        )
        assert len(completion.token_ids) == room and completion.finish_reason == "length"


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request([1] * (CONTEXT - K - 1), 7), "no room for a response"),
        (Request([1] * 500, 7), "prompt of 500 tokens"),
        (Request([], 7), "empty prompt"),
        (Request([1, V], 7), "outside of the policy's vocabulary of 40"),
        (Request([-1], 7), "outside of the policy's vocabulary"),
        (Request([1], -7), "seed"),
        (Request([1], 2**63), "seed"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(engine, request_, words):
    before = engine.spec_stats()
    with pytest.raises(EngineError, match=words):
        engine.generate([Request([1], 7), request_], SamplingConfig(max_tokens=4), deadline_s=300)
    assert engine.spec_stats() == before
    assert not engine._llm.llm_engine.has_unfinished_requests()


def test_sampling_that_speculation_cannot_do_is_refused(engine):
    for sampling in (SamplingConfig(min_p=0.1), SamplingConfig(logit_bias={"3": 1.0}), SamplingConfig(top_p=0.0)):
        with pytest.raises(ConfigError):
            engine.generate([Request([1], 7)], sampling, deadline_s=300)


def test_nothing_to_do(engine):
    assert engine.generate([], SamplingConfig(), deadline_s=1) == []


# -- ending early -------------------------------------------------------------------------------------------------


def tired_after(calls: int):
    remaining = iter(range(calls))
    return lambda: next(remaining, None) is None


def raise_keyboard_interrupt(done: int, tokens: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["stop at once", "stop later", "deadline", "ctrl-c"])
def test_the_engine_is_clean_after_an_early_end(engine, how):
    requests, sampling = some_requests(20), SamplingConfig(max_tokens=30)
    expected = engine.generate(requests, sampling, deadline_s=300)
    stats = engine.spec_stats()
    arguments, error = {
        "stop at once": (dict(deadline_s=60, should_stop=lambda: True), RolloutInterrupted),
        "stop later": (dict(deadline_s=60, should_stop=tired_after(9)), RolloutInterrupted),
        "deadline": (dict(deadline_s=0.03, should_stop=lambda: time.sleep(0.01) is not None), RolloutDeadline),
        "ctrl-c": (dict(deadline_s=60, on_progress=raise_keyboard_interrupt), KeyboardInterrupt),
    }[how]
    with pytest.raises(error) as raised:
        engine.generate(requests, sampling, **arguments)
    if how == "deadline":
        assert "deadline of 0.03 s with 20 of 20 responses unfinished: request 0 (2 prompt tokens" in str(raised.value)
        assert "rollout.deadline_s" in str(raised.value)
    assert engine.spec_stats() == stats, "dropped responses are not counted"
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert rows(engine.generate(requests, sampling, deadline_s=300)) == rows(expected)


def test_progress_counts_up_to_everything(engine):
    calls = []
    completions = engine.generate(
        some_requests(20),
        SamplingConfig(max_tokens=30),
        deadline_s=60,
        on_progress=lambda done, tokens: calls.append((done, tokens)),
    )
    assert calls[-1] == (20, sum(len(c.token_ids) for c in completions))
    assert calls == sorted(calls)
    assert 0 < calls[0][1], "tokens of unfinished requests are counted too"


# -- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_add_up(engine):
    before = engine.spec_stats()
    completions = engine.generate(some_requests(16), SamplingConfig(max_tokens=24), deadline_s=300)
    stats = engine.spec_stats() - before
    assert stats.drafts == sum(c.num_drafts for c in completions) > 0
    assert stats.accepted == sum(c.num_accepted for c in completions) == sum(stats.accepted_per_pos) > 0
    assert stats.draft_tokens == K * stats.drafts
    assert stats.accepted_per_pos == sorted(stats.accepted_per_pos, reverse=True) and len(stats.accepted_per_pos) == K
    for c in completions:
        # One token comes from the prefill, then each verification gives one and what it accepted; a stop or the length
        # limit can cut the last.
        given = 1 + c.num_drafts + c.num_accepted
        assert len(c.token_ids) <= given <= len(c.token_ids) + K


def test_logprobs_can_be_left_out(engine):
    with_, without = (
        engine.generate(some_requests(3), SamplingConfig(max_tokens=5), deadline_s=60, return_logprobs=flag)
        for flag in (True, False)
    )
    assert rows(with_) == rows(without) and all(not c.logprobs for c in without)


def test_sleep_needs_a_gpu(engine):
    with pytest.raises(EngineError, match="GPU"):
        engine.sleep()
    engine.wake()  # awake already: nothing to do
