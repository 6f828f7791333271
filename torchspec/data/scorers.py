"""Scorers for JSONL environments: ``score(prompt, response, answer, row) -> float | dict[str, float]``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from torchspec.errors import ConfigError

Scorer = Callable[[Any, str, Any, dict[str, Any]], "float | dict[str, float]"]

_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
RELATIVE_TOLERANCE = 1e-6


def exact(prompt: Any, response: str, answer: Any, row: dict[str, Any]) -> float:
    """1 where response and answer are the same text, less the white space around them."""
    return float(response.strip() == str(answer).strip())


def contains(prompt: Any, response: str, answer: Any, row: dict[str, Any]) -> float:
    """1 where the answer's text occurs in the response."""
    return float(str(answer).strip() in response)


def numeric(prompt: Any, response: str, answer: Any, row: dict[str, Any]) -> float:
    """1 where the last number in the response equals the answer, to a relative 1e-6; 1,234.5 is 1234.5."""
    found = numbers_in(response)
    if not found:
        return 0.0
    return float(math.isclose(found[-1], to_number(answer), rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12))


def numbers_in(text: str) -> list[float]:
    """Every decimal number in the text. A minus sign counts where no letter, digit or ``)`` is before it."""
    found = []
    for match in _NUMBER.finditer(text):
        token = match.group()
        before = text[match.start() - 1] if match.start() else " "
        if token[0] in "+-" and (before.isalnum() or before == ")"):
            token = token[1:]  # "10-3" is a difference, and its last number is 3
        found.append(float(token.replace(",", "")))
    return found


def to_number(answer: Any) -> float:
    """The answer of a row as a number. Raises ValueError when it is none."""
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        raise ValueError(f"{answer!r} is not a number")
    number = float(answer.strip().replace(",", "")) if isinstance(answer, str) else float(answer)
    if not math.isfinite(number):
        raise ValueError(f"{answer!r} is not finite")
    return number


BUILT_IN: dict[str, Scorer] = {"exact": exact, "contains": contains, "numeric": numeric}


def load_scorer(name: str) -> Scorer:
    """A built-in scorer, or the function that ``module:function`` or ``path/to/file.py:function`` names.

    Raises:
        ConfigError: the name is unknown, or names something that cannot be called.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(
            f"environment.scorer = '{name}' is unknown. It is {', '.join(BUILT_IN)}, 'module:function' or "
            "'path/to/file.py:function'."
        )
    from torchspec.plugins import load_object

    scorer = load_object(name)
    if not callable(scorer):
        raise ConfigError(f"environment.scorer = '{name}' is a {type(scorer).__name__}, not a function.")
    return scorer
