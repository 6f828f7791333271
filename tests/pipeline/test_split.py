"""The stage split: against all splits of small cases, and the draft's stage gets fewer layers."""

from __future__ import annotations

import itertools
import random

import pytest

from torchspec.errors import ConfigError
from torchspec.pipeline.split import draft_cost_in_layers, head_cost_in_layers, split_layers


@pytest.mark.parametrize("trial", range(20))
def test_no_other_split_is_better(trial):
    chance = random.Random()
    costs = [chance.choice([1.0, 1.0, 2.0, 0.5]) for _ in range(chance.randint(4, 9))]
    stages = chance.randint(1, 4)
    extra = dict(
        first_cost=chance.random(),
        last_cost=2 * chance.random(),
        draft_cost=3 * chance.random(),
        draft_stage=chance.randrange(stages),
    )

    def stage_costs(counts: tuple[int, ...]) -> list[float]:
        found, start = [], 0
        for count in counts:
            found.append(sum(costs[start : start + count]))
            start += count
        found[0] += extra["first_cost"]
        found[-1] += extra["last_cost"]
        found[extra["draft_stage"]] += extra["draft_cost"]
        return found

    every = [c for c in itertools.product(range(1, len(costs) + 1), repeat=stages) if sum(c) == len(costs)]
    least = min(max(stage_costs(c)) for c in every)
    mine = split_layers(costs, stages, **extra)
    assert sum(mine) == len(costs) and min(mine) >= 1
    assert max(stage_costs(mine)) == pytest.approx(least), f"{costs} {stages} {extra}"


def test_the_drafts_stage_gets_fewer_layers():
    assert split_layers([1.0] * 16, 4) == [4, 4, 4, 4]
    assert split_layers([1.0] * 16, 4, draft_cost=4.0) == [5, 5, 5, 1]
    assert split_layers([1.0] * 14, 4, draft_cost=2.0, draft_stage=1) == [4, 2, 4, 4]
    with pytest.raises(ConfigError, match="at most 3 stages"):
        split_layers([1.0] * 3, 4)


def test_costs_are_in_policy_layers():
    """A one-layer draft with the policy's shapes, one pass and no vocabulary costs one layer."""
    assert draft_cost_in_layers(layer_params=10, draft_params=10, num_passes=1, vocab=0, draft_vocab=0, hidden=8) == 1.0
    assert (
        draft_cost_in_layers(layer_params=10, draft_params=10, num_passes=3, vocab=30, draft_vocab=0, hidden=1) == 4.0
    )
    assert head_cost_in_layers(layer_params=10, vocab=5, hidden=2) == 1.0
