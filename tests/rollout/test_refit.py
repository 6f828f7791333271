"""New weights for a running engine: equal to a fresh engine on them, both models, and checked before anything is
sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from tiny_models import change, draft_for, hf_logprobs, hf_weights, make_policy, read_draft, write_draft

from torchspec.rollout import transfer
from torchspec.rollout.config import RolloutConfig, SamplingConfig
from torchspec.rollout.engine import EngineError, Request, request_seed
from torchspec.rollout.vllm import VllmEngine

pytestmark = pytest.mark.vllm
V = 12
CONFIG = RolloutConfig(kv_cache_mb=16, max_model_len=64, max_num_seqs=16)


@dataclass
class Pair:
    """A policy and a draft, as folders and as the weights that a trainer would send."""

    folder: Path
    policy: object

    def policy_weights(self):
        return hf_weights(self.policy)

    def draft_weights(self):
        return read_draft(self.folder / "draft")

    def engine(self) -> VllmEngine:
        return VllmEngine(self.folder / "policy", self.folder / "draft", CONFIG)


def make_pair(folder: Path, kind: str, *, trained: bool = False) -> Pair:
    """A pair of models; the ``trained`` one has moved a little in every tensor, and its draft vocabulary is another."""
    folder.mkdir(parents=True)
    policy = make_policy(folder / "policy", vocab=V, tied=kind == "tied", seed=11, moved=5 if trained else 0)
    draft_vocab = 6 if kind == "tied" else 0
    tensors = draft_for(
        policy, vocab=V, draft_vocab=draft_vocab, own_embed=kind == "tied", seed=12, offset=int(trained)
    )
    if trained:
        change(tensors, 6)
    elif kind == "copied head":
        tensors["lm_head.weight"] = policy.lm_head.weight.detach().clone()
    write_draft(folder / "draft", tensors, vocab=V, draft_vocab=draft_vocab)
    return Pair(folder, policy)


def served(engine: VllmEngine) -> list[tuple]:
    """Tokens, log-probabilities and accepted draft tokens of sampled and greedy responses: the last shows the draft."""
    requests = [Request([i, 3, (i + 5) % V], request_seed(9, 1, i, 0)) for i in range(12)]
    result = []
    for temperature in (1.0, 0.0):
        completions = engine.generate(requests, SamplingConfig(temperature=temperature, max_tokens=24), deadline_s=300)
        result += [(c.token_ids, c.logprobs, c.num_drafts, c.num_accepted) for c in completions]
    return result


def check_draft_shows(rows: list[tuple]) -> None:
    assert sum(row[3] for row in rows) > 20, "too few accepted draft tokens to tell drafts apart"


def check_against_hugging_face(rows: list[tuple], policy) -> None:
    for i, row in enumerate(rows[:12]):
        expected = hf_logprobs(policy, [i, 3, (i + 5) % V], row[0], 1.0)
        torch.testing.assert_close(torch.tensor(row[1]), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["tied", "copied head"])
def test_a_refitted_engine_equals_a_fresh_one(tmp_path, kind):
    """tied: tied embeddings, and a draft with a vocabulary (d2t) and an embedding of its own. copied head: the draft
    starts with the policy's head, which vLLM would make one with the policy's."""
    old, new = make_pair(tmp_path / "old", kind), make_pair(tmp_path / "new", kind, trained=True)
    with new.engine() as fresh:
        expected = served(fresh)
    check_draft_shows(expected)
    check_against_hugging_face(expected, new.policy)
    with old.engine() as engine:
        assert engine.version() == -1
        original = served(engine)
        engine.refit(new.policy_weights(), new.draft_weights(), 7)
        assert engine.version() == 7
        assert served(engine) == expected
        engine.refit(old.policy_weights(), old.draft_weights(), 8)
        assert served(engine) == original
        if kind == "tied":  # the head is added where the sender leaves it out
            engine.refit(hf_weights(new.policy, tied_head=False), new.draft_weights(), 9)
            assert served(engine) == expected
            wrong = [(n, t + 1 if n == "lm_head.weight" else t) for n, t in new.policy_weights()]
            with pytest.raises(EngineError, match="tied, but lm_head.weight differs"):
                engine.refit(wrong, None, 10)


def test_a_refit_that_breaks_off_leaves_no_usable_engine(tmp_path, monkeypatch):
    """vLLM cannot be brought back from half a reload; serving mixed weights would be silent."""
    pair = make_pair(tmp_path / "pair", "untied")
    wrong = [(n, t[:5] if n.endswith("layers.1.mlp.up_proj.weight") else t) for n, t in pair.policy_weights()]
    monkeypatch.setattr(transfer, "check_census", lambda model, weights, contract: list(weights))
    with pair.engine() as engine:
        with pytest.raises(EngineError, match="refit to version 6 broke off .*: .*Build another engine"):
            engine.refit(wrong, pair.draft_weights(), 6)
        for attempt in (lambda: served(engine), lambda: engine.refit(pair.policy_weights(), None, 7), engine.version):
            with pytest.raises(EngineError, match="half replaced; build another engine"):
                attempt()


# -- one engine for the rest --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit")
    old, new = make_pair(folder / "old", "untied"), make_pair(folder / "new", "untied", trained=True)
    with new.engine() as fresh:
        expected = served(fresh)
    check_draft_shows(expected)
    with old.engine() as engine:
        yield engine, old, new, served(engine), expected


@pytest.fixture(autouse=True)
def back_to_old(request):
    yield
    if "running" in request.fixturenames:
        engine, old, _, original, _ = request.getfixturevalue("running")
        engine.refit(old.policy_weights(), old.draft_weights(), 0)
        assert served(engine) == original


def test_policy_and_draft_can_be_sent_one_by_one(running):
    engine, old, new, original, expected = running
    engine.refit(None, new.draft_weights(), 1)
    mixed = served(engine)
    # Greedy tokens are the policy's alone; what is accepted is not. (Log-probabilities move with the batch's shape.)
    assert [row[0] for row in mixed[12:]] == [row[0] for row in original[12:]]
    assert [row[3] for row in mixed] != [row[3] for row in original]
    engine.refit(new.policy_weights(), None, 2)
    assert served(engine) == expected
    assert engine.version() == 2


def test_the_engine_keeps_copies(running):
    """The trainer goes on to change its weights in place."""
    engine, _, new, _, expected = running
    policy = [(n, t.clone()) for n, t in new.policy_weights()]
    draft = [(n, t.clone()) for n, t in new.draft_weights()]
    engine.refit(iter(policy), iter(draft), 3)
    for _, tensor in [*policy, *draft]:
        tensor.zero_()
    assert served(engine) == expected


def test_weights_that_require_grad_are_taken(running):
    engine, _, new, _, expected = running
    policy = [(n, t.clone().requires_grad_()) for n, t in new.policy_weights()]
    engine.refit(policy, new.draft_weights(), 4)
    assert served(engine) == expected


def without(weights, name):
    return [(n, t) for n, t in weights if n != name]


@pytest.mark.parametrize("model", ["policy", "draft"])
def test_the_census_is_taken_before_anything_is_sent(running, model):
    engine, _, new, original, _ = running
    weights = new.policy_weights() if model == "policy" else new.draft_weights()
    norm = "model.layers.1.self_attn.q_norm.weight" if model == "policy" else "norm.weight"
    cases = {
        f"{norm} is missing": without(weights, norm),
        "lm_head.weight is missing": without(weights, "lm_head.weight"),
        "extra.weight is unknown to the engine": [*weights, ("extra.weight", torch.zeros(2))],
        rf"{norm} has shape \[3\] instead of": [*without(weights, norm), (norm, torch.zeros(3))],
        f"{norm} comes twice": [*weights, (norm, torch.zeros(64))],
    }
    for sentence, wrong in cases.items():
        both = (wrong, new.draft_weights()) if model == "policy" else (new.policy_weights(), wrong)
        with pytest.raises(EngineError, match=f"The {model}'s weights are not .*{sentence}.* Nothing was sent"):
            engine.refit(*both, 5)
        assert engine.version() == 0
    assert served(engine) == original


def test_the_version_is_read_back(running, monkeypatch):
    engine, _, new, _, _ = running
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "update_weight_version", lambda version: None)
        with pytest.raises(EngineError, match="refitted to version 6, but reports 0"):
            engine.refit(new.policy_weights(), new.draft_weights(), 6)
        with pytest.raises(EngineError, match="refit both models"):
            served(engine)


def test_a_prefix_cache_that_stays_is_an_error(running, monkeypatch):
    engine, _, new, _, _ = running
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(EngineError, match="prefix cache"):
            engine.refit(new.policy_weights(), new.draft_weights(), 6)


def test_memory_does_not_grow_with_refits(running):
    engine, old, new, _, _ = running
    process = psutil.Process()
    sizes = []
    for i in range(30):
        pair = new if i % 2 else old
        engine.refit(pair.policy_weights(), pair.draft_weights(), i)
        sizes.append(process.memory_info().rss)
    assert max(sizes[10:]) - sizes[9] < 8 << 20
