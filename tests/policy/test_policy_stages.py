"""Cutting the policy into stages: who holds what, what a cut costs, and parts that add up to the whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from learner_cases import VOCAB, make_config

from torchspec.errors import ConfigError
from torchspec.pipeline.config import PipelineConfig
from torchspec.pipeline.runner import fit_microbatches
from torchspec.pipeline.schedule import schedule_table
from torchspec.policy.hf import save_policy
from torchspec.policy.stages import PolicyPart, draft_holder, plan_stages
from torchspec.policy.titan import build_policy, read_shape


def shape(**changes):
    return dataclasses.replace(read_shape(make_config().policy, VOCAB), **changes)


def test_the_draft_takes_layers_off_its_stage():
    config = PipelineConfig(ranks=2)
    small = shape(num_layers=10, vocab_size=8, hidden_size=512, intermediate_size=2048)
    even = plan_stages(config, small, -1, 0.0)
    assert [len(part.layers) for part in even.parts] == [5, 5]
    assert [len(part.layers) for part in plan_stages(config, small, -1, 4.0).parts] == [7, 3]
    assert [len(part.layers) for part in plan_stages(config, small, 0, 4.0).parts] == [3, 7]
    own = PipelineConfig(ranks=2, draft_cost=2.0)
    assert [len(part.layers) for part in plan_stages(own, small, -1, 4.0).parts] == [6, 4]


def test_the_ends_of_a_v_meet_on_the_first_rank():
    plan = plan_stages(PipelineConfig(ranks=2, schedule="ZBVZeroBubble"), shape(num_layers=8), -1, 0.0)
    assert plan.holders == (0, 1, 1, 0) and plan.draft_rank == 0
    first, second = plan.part_of(0), plan.part_of(1)
    assert first.embed and first.head and not (second.embed or second.head)
    assert sorted((*first.layers, *second.layers)) == list(range(8))
    assert plan.stage_of_tap((0, 8)) == {0: 0, 8: 3}


@pytest.mark.parametrize("layers", [(4,), (8, 0), (3, 4)])
def test_layers_that_are_not_the_models(layers):
    with pytest.raises(ConfigError, match=r"pipeline.layers = .* 8 in all"):
        plan_stages(PipelineConfig(ranks=2, layers=layers), shape(num_layers=8), -1, 0.0)


def test_more_stages_than_layers_and_a_stage_that_is_not_there():
    with pytest.raises(ConfigError, match="3 policy layers cannot be cut into 4"):
        plan_stages(PipelineConfig(ranks=4), shape(num_layers=3), -1, 0.0)
    with pytest.raises(ConfigError, match="draft.stage = 2: the pipeline has the stages 0 to 1"):
        draft_holder(PipelineConfig(ranks=2), 2)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("at_least", [0, 1, 3, 5, 8])
def test_the_next_number_of_microbatches_that_a_schedule_takes(schedule, at_least):
    config = PipelineConfig(ranks=4, schedule=schedule)
    found = fit_microbatches(config, at_least)
    assert found >= max(1, at_least)
    schedule_table(schedule, 4, found)
    for fewer in range(max(1, at_least), found):
        with pytest.raises(ConfigError):
            schedule_table(schedule, 4, fewer)


@pytest.mark.parametrize("tied", [False, True])
def test_parts_have_the_weights_of_the_whole(tied, tmp_path):
    config = dataclasses.replace(make_config().policy, tie_word_embeddings=tied)
    build = dict(vocab_size=VOCAB, seed=3, device="cpu")
    whole = build_policy(config, **build)
    save_policy(whole, tmp_path / "policy")
    parts = (PolicyPart((0, 1), True, False), PolicyPart((2, 3), False, True))
    for source in (config, dataclasses.replace(config, path=str(tmp_path / "policy"))):
        found: dict[str, torch.Tensor] = {}
        for part in parts:
            found |= build_policy(source, part=part, **build).hf_parameters()
        expected = whole.hf_parameters()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], p) for name, p in expected.items())


def test_a_part_still_checks_the_whole_folder(tmp_path):
    config = make_config().policy
    whole = build_policy(config, vocab_size=VOCAB, seed=3, device="cpu")
    weights = [(name, w) for name, w in whole.hf_weights(include_tied_head=False) if "layers.3" not in name]
    save_policy(whole, tmp_path / "policy", weights=weights)
    with pytest.raises(ConfigError, match="missing model.layers.3"):
        part = PolicyPart((0, 1), True, False)
        build_policy(
            dataclasses.replace(config, path=str(tmp_path / "policy")),
            vocab_size=VOCAB,
            seed=3,
            device="cpu",
            part=part,
        )
