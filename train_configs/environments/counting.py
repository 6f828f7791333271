"""An environment outside the package: count on from a number, in steps, in a given form.

Its responses are long (20 numbers are about 80 tokens), so that speculation has something to speed up, and
its score has a slope: every number that is right counts, and so does the form.
"""

from __future__ import annotations

import re

from torchspec.data.environments import Environment, Item

FORM = re.compile(r"\d+(, \d+)*")


class Counting(Environment):
    """The task "Count up from 14 in steps of 2", after one worked example (another start, the same step).

    Args:
        numbers: how many numbers are asked for.
        max_start: largest first number.
        max_step: largest step.
    """

    def __init__(self, numbers: int = 20, max_start: int = 99, max_step: int = 2):
        self.numbers, self.max_start, self.max_step = numbers, max_start, max_step

    def make(self, rng):
        step = rng.randint(1, self.max_step)
        start, example = rng.sample(range(1, self.max_start + 1), 2)
        wanted = [start + i * step for i in range(self.numbers)]
        return Item(
            prompt=[
                {"role": "user", "content": self._question(example, step)},
                {"role": "assistant", "content": self._line(example, step)},
                {"role": "user", "content": self._question(start, step)},
            ],
            answer=self._line(start, step),
            row={"wanted": wanted},
        )

    def score(self, item, response):
        """Two components.

        ``right``: 0.8 x the share of numbers that are right and in order, of the longer of the two lists, so
        that running on costs too. ``form``: 0.2 where the response is such a line and nothing else.
        """
        wanted = item.row["wanted"]
        given = [int(digits) for digits in re.findall(r"\d{1,9}", response)]
        return {
            "right": 0.8 * common_subsequence(wanted, given) / max(len(wanted), len(given)),
            "form": 0.2 * bool(FORM.fullmatch(response.strip())),
        }

    def _question(self, start: int, step: int) -> str:
        return (
            f"Count up from {start} in steps of {step}. Write {self.numbers} numbers on one line, separated "
            "by commas, and nothing else."
        )

    def _line(self, start: int, step: int) -> str:
        return ", ".join(str(start + i * step) for i in range(self.numbers))


def common_subsequence(a: list[int], b: list[int]) -> int:
    """Length of the longest list that both contain in order."""
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0  # the entry one up, one to the left
        for j, y in enumerate(b):
            previous, row[j + 1] = row[j + 1], previous + 1 if x == y else max(row[j + 1], row[j])
    return row[-1]
