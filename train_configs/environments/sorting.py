"""reasoning-gym's number_sorting with a prompt short enough for a policy that reads single characters.

Numbers, expected answer and the test of exactness are reasoning-gym's own; the question is said in fewer words, and half of
the reward is the share of numbers that stand in their place, so that a nearly sorted list is worth something:

    ascending: 48, 51, 7        ->  ['7.0', '48.0', '51.0']

The reference answers, which only a warm start reads, come from a careless teacher: some are sorted the wrong way. The policy
learns from them how to sort, and from the reward which way.
"""

from __future__ import annotations

import random
import re
from typing import Any

from torchspec.data.environments import Item, stable_seed
from torchspec.data.reasoning_gym import ReasoningGym


class ShortNumberSorting(ReasoningGym):
    """number_sorting.

    Args:
        careless: share of the reference answers that are sorted the wrong way.
        args: the task's own settings (min_numbers, max_value, ...).
    """

    def __init__(self, careless: float = 0.0, **args: Any) -> None:
        super().__init__("number_sorting", args)
        self.careless = careless

    def draw(self, stream: str, index: int) -> Item:
        item = super().draw(stream, index)
        numbers = ", ".join(f"{float(n):g}" for n in item.row["metadata"]["original_numbers"])
        answer = list(item.row["metadata"]["sorted_numbers"])
        if random.Random(stable_seed(self.seed, "careless", stream, index)).random() < self.careless:
            answer.reverse()
        return Item(f"{item.row['metadata']['direction']}: {numbers}", str(answer), item.row)

    def score(self, item: Item, response: str) -> dict[str, float]:
        """exact: reasoning-gym's score. placed: share of numbers in their place. The reward is their mean."""
        wanted = [float(n) for n in item.row["metadata"]["sorted_numbers"]]
        found = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", response)]
        placed = sum(a == b for a, b in zip(found, wanted)) / max(len(found), len(wanted))
        exact = super().score(item, response)
        return {"exact": exact, "placed": placed, "reward": (exact + placed) / 2}
