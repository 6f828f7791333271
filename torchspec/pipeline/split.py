"""How many policy layers each stage gets, when the draft, the head and the embedding are counted.

Costs are in policy layers: one layer's forward and backward on one microbatch is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchspec.errors import ConfigError


def draft_cost_in_layers(
    *, layer_params: int, draft_params: int, num_passes: int, vocab: int, draft_vocab: int, hidden: int
) -> float:
    """Estimate of the draft's cost on one microbatch, in policy layers.

    Per token a weight costs 2 operations forward and 4 backward: the draft's layers and head run
    ``num_passes`` times in both, the teacher's head once, forward only. Attention's quadratic part is left
    out on both sides.
    """
    student = 3 * num_passes * (draft_params + draft_vocab * hidden)
    return (student + vocab * hidden) / (3 * layer_params)


def head_cost_in_layers(*, layer_params: int, vocab: int, hidden: int) -> float:
    """Estimate of the policy's head and loss on one microbatch, in policy layers."""
    return vocab * hidden / layer_params


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    draft_cost: float = 0.0,
    draft_stage: int = -1,
) -> list[int]:
    """Layers of every stage, in order, such that the most expensive stage costs as little as possible.

    ``layer_costs``: one entry a layer (all 1.0 for equal layers; your own numbers override the model).
    ``first_cost`` is added to stage 0 (embedding), ``last_cost`` to the last (head and loss), ``draft_cost``
    to ``draft_stage``. Among the best splits the one with the least sum of squares. Every stage gets at least
    one layer.

    Raises ConfigError when there are fewer layers than stages.
    """
    num_layers = len(layer_costs)
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} policy layers cannot be cut into {num_stages} pipeline stages: every stage needs "
            f"one. Use at most {num_layers} stages."
        )
    extra = [0.0] * num_stages
    extra[0] += first_cost
    extra[-1] += last_cost
    extra[draft_stage] += draft_cost
    sums = [0.0]
    for cost in layer_costs:
        sums.append(sums[-1] + cost)

    def best(combine, limit: float) -> tuple[float, list[int]]:
        """Dynamic program over (stages, layers so far); stages that cost more than ``limit`` are left out."""
        table = {0: (0.0, [])}
        for stage in range(num_stages):
            rest, fresh = num_stages - 1 - stage, {}
            for start, (value, counts) in table.items():
                for end in range(start + 1, num_layers - rest + 1):
                    cost = sums[end] - sums[start] + extra[stage]
                    if cost > limit:
                        continue
                    found = (combine(value, cost), [*counts, end - start])
                    if end not in fresh or found[0] < fresh[end][0]:
                        fresh[end] = found
            table = fresh
        return table[num_layers]

    lowest, _ = best(max, float("inf"))
    return best(lambda value, cost: value + cost * cost, lowest * (1 + 1e-9))[1]
