"""An environment outside the package: count on from a number, in steps, in a given form.

Its responses are long (20 numbers are about 80 tokens), so that speculation has something to speed up, and its score has
a slope: every further number that is right counts, and so does the form.
"""

from __future__ import annotations

import re

from torchspec.data.environments import Environment, Item

FORM = re.compile(r"\d+(, \d+)*")


class Counting(Environment):
    """"Count up from 14 in steps of 3."

    Args:
        numbers: how many numbers are asked for.
        max_start: largest first number.
        max_step: largest step.
    """

    def __init__(self, numbers: int = 20, max_start: int = 99, max_step: int = 5):
        self.numbers, self.max_start, self.max_step = numbers, max_start, max_step

    def make(self, rng):
        start, step = rng.randint(1, self.max_start), rng.randint(1, self.max_step)
        wanted = [start + i * step for i in range(self.numbers)]
        prompt = (
            f"Count up from {start} in steps of {step}. Write {self.numbers} numbers, beginning with {start}, on one line, "
            "separated by commas, and write nothing else."
        )
        return Item(prompt=prompt, answer=", ".join(map(str, wanted)), row={"wanted": wanted})

    def score(self, item, response):
        """``right``: 0.8 x the share of numbers that are right before the first wrong one (of the longer of the two
        lists, so that running on costs too); ``form``: 0.2 where the response is such a line and nothing else."""
        wanted = item.row["wanted"]
        given = [int(digits) for digits in re.findall(r"\d{1,9}", response)]
        right = 0
        while right < min(len(wanted), len(given)) and given[right] == wanted[right]:
            right += 1
        return {
            "right": 0.8 * right / max(len(wanted), len(given)),
            "form": 0.2 * bool(FORM.fullmatch(response.strip())),
        }
