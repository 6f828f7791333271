"""A JSONL file as an environment.

One object a line: ``prompt`` (text or messages), ``answer``, and free columns.

The held-out items are the first of a seeded shuffle of the different prompts; training goes through the rest,
reshuffled every epoch, without end. A prompt that occurs twice is held out twice or not at all.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from torchspec.data.environments import Environment, Item, stable_seed
from torchspec.data.scorers import BUILT_IN, load_scorer, to_number
from torchspec.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")


class JsonlEnvironment(Environment):
    """Prompts and answers of a file.

    Args:
        path: the file, UTF-8; blank lines are passed over.
        scorer: exact, contains, numeric, "module:function" or "path/to/file.py:function" (see
            data/scorers.py). With a function of your own the column ``answer`` may be missing; it then gets
            None.

    Raises:
        ConfigError: no such file, an empty one, a bad line (named by its number), an unknown scorer.
    """

    def __init__(self, path: str, scorer: str) -> None:
        self.scorer = load_scorer(scorer)
        self.path = path
        self.items = read_items(path, scorer)

    def bind(self, seed: int, num_eval: int) -> None:
        super().bind(seed, num_eval)
        different = sorted({item.key() for item in self.items})
        if num_eval >= len(different):
            raise ConfigError(
                f"{self.path} holds {len(different)} different prompts, and environment.eval_items = "
                f"{num_eval} of them are to be held out, which leaves nothing to train on; lower it or give "
                "more prompts."
            )
        random.Random(stable_seed(seed, "jsonl held out")).shuffle(different)
        held_out = different[:num_eval]
        first = {item.key(): item for item in reversed(self.items)}
        self._eval_items, self._eval_keys = [first[key] for key in held_out], frozenset(held_out)
        self.train_items = [item for item in self.items if item.key() not in self._eval_keys]
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def draw(self, stream: str, index: int) -> Item:
        epoch, position = divmod(index, len(self.train_items))
        return self.train_items[self._order(stream, epoch)[position]]

    def score(self, item: Item, response: str) -> float | dict[str, float]:
        return self.scorer(item.prompt, response, item.row.get("answer"), item.row)

    def _shuffled(self, stream: str, epoch: int) -> list[int]:
        order = list(range(len(self.train_items)))
        random.Random(stable_seed(self.seed, "jsonl order", stream, epoch)).shuffle(order)
        return order


def read_items(path: str, scorer: str) -> list[Item]:
    """All rows of the file, checked. Raises ConfigError, naming file and line."""
    if not path:
        raise ConfigError("environment.path must name a JSONL file when environment.name = 'jsonl'.")
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"environment.path = '{path}' cannot be read: {error.strerror or error}.") from error
    items = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                items.append(_item(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), scorer))
            except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, a bad row
                raise ConfigError(f"{path}, line {number}: {error}.") from error
    if not items:
        raise ConfigError(f"{path} holds no prompt: the file is empty.")
    return items


def _item(row: Any, scorer: str) -> Item:
    """A checked row. Raises ValueError with the reason."""
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, this is a {type(row).__name__}")
    if "prompt" not in row:
        raise ValueError(f"the column 'prompt' is missing; the line has {sorted(row)}")
    _check_prompt(row["prompt"])
    answer = row.get("answer")
    if scorer in BUILT_IN:
        _check_answer(row, scorer)
    text = str(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) else None
    return Item(prompt=row["prompt"], answer=text, row=row)


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("the prompt must be text or a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("every message of the prompt needs 'role' and a text 'content'")
        if message.get("role") not in ROLES:
            raise ValueError(f"a message's role is {message.get('role')!r}; it must be one of {', '.join(ROLES)}")


def _check_answer(row: dict[str, Any], scorer: str) -> None:
    if "answer" not in row:
        raise ValueError(f"the column 'answer' is missing, and scorer '{scorer}' needs it; the line has {sorted(row)}")
    answer = row["answer"]
    if scorer == "numeric":
        try:
            to_number(answer)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"scorer 'numeric' needs a number as answer; {answer!r} is none") from error
    elif isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"scorer '{scorer}' needs text or a number as answer, not {answer!r}")
    elif not str(answer).strip():
        raise ValueError(f"the answer is empty, which scorer '{scorer}' cannot compare with")
