"""Environments: where prompts come from, and what judges the responses.

An environment answers two questions: which item is number ``index`` of a split, and what is a response to it
worth. Items follow from (seed, split, index) alone, so the cursor of a run is one integer and a resumed run
sees the same prompts.

    Environment            the base class: ``make`` (or ``draw``) and ``score`` are yours
    data/reasoning_gym.py  tasks of the reasoning-gym package
    data/jsonl.py          a file of prompts and answers
    data/scoring.py        calling scorers with a time limit (``score_all``, re-exported here)

An environment of your own is a class in any file, named in the config as ``path/to/file.py:Class``:

    class Sums(Environment):
        def __init__(self, digits: int = 2):          # environment.args of the config
            self.digits = digits

        def make(self, rng):                          # rng: random.Random, the only source of chance
            a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
            return Item(prompt=f"{a}+{b}=", answer=str(a + b))

        def score(self, item, response):
            return float(response.strip() == item.answer)
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

from torchspec.data.config import EnvironmentConfig
from torchspec.data.scoring import ScoreBatch, ScorerFailure, score_all
from torchspec.errors import ConfigError

__all__ = [
    "Environment",
    "Item",
    "ScoreBatch",
    "ScorerFailure",
    "build_environment",
    "score_all",
    "stable_seed",
]

# How often a prompt that the other split holds is drawn again before the task is called too small.
REDRAWS = 64


@dataclass(frozen=True)
class Item:
    """One prompt.

    Attributes:
        prompt: text (it becomes one user message) or a list of messages, ``{"role": ..., "content": ...}``.
        answer: the reference response as text, which a warm start teaches; None where the task has none.
        row: what the scorer wants to know besides, free of form.
    """

    prompt: str | list[dict[str, str]]
    answer: str | None = None
    row: dict[str, Any] = field(default_factory=dict)

    def key(self) -> str:
        """Items with one key are the same prompt."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


class Environment:
    """Base class. A subclass gives ``make`` and ``score``; where its items are not drawn at random, ``draw``.

    A subclass's ``__init__`` takes ``environment.args`` as keyword arguments and need not call this class's.
    """

    seed: int = 0
    num_eval: int = 0
    _eval_items: list[Item] | None = None

    def make(self, rng: random.Random) -> Item:
        """One item. All chance comes from ``rng``."""
        raise NotImplementedError(f"{type(self).__name__} must define make(rng) or draw(stream, index).")

    def draw(self, stream: str, index: int) -> Item:
        """Item ``index`` of an endless stream, the same at every call; other streams are independent."""
        return self.make(random.Random(stable_seed(self.seed, stream, index)))

    def score(self, item: Item, response: str) -> float | dict[str, float]:
        """Worth of the response text.

        A dict gives components, logged as ``reward/<name>``. The reward is its entry "reward" where there is
        one (which is then not a component), else the sum of the components.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(item, response).")

    # ---- the two splits, made of the streams ----

    def bind(self, seed: int, num_eval: int) -> None:
        """Fix the seed of the run and the number of held-out items. ``build_environment`` calls it once."""
        if num_eval < 0:
            raise ConfigError(f"environment.eval_items = {num_eval} must be 0 or more.")
        self.seed, self.num_eval, self._eval_items = seed, num_eval, None

    def item(self, index: int, split: str) -> Item:
        """Item ``index`` (0-based) of ``split``, "train" (endless) or "eval" (``num_eval`` distinct prompts).

        No prompt of the eval split is ever an item of the train split.

        Raises:
            ConfigError: the task has too few different prompts for both splits.
            IndexError: ``index`` is outside the eval split.
        """
        if split == "eval":
            held_out = self._held_out()
            if not 0 <= index < len(held_out):
                raise IndexError(f"eval item {index} was asked for, but environment.eval_items = {len(held_out)}.")
            return held_out[index]
        if split != "train":
            raise ValueError(f"split '{split}' is unknown; there are 'train' and 'eval'.")
        taken = self._eval_keys if self._held_out() else frozenset()
        for attempt in range(REDRAWS):
            item = self.draw("train" if attempt == 0 else f"train/{attempt}", index)
            if item.key() not in taken:
                return item
        raise ConfigError(
            f"{REDRAWS} draws for training item {index} all gave prompts of the held-out split: the task has "
            f"too few different prompts. Lower environment.eval_items (now {self.num_eval}) or widen "
            "environment.args."
        )

    def _held_out(self) -> list[Item]:
        """The eval split, drawn once: the first ``num_eval`` different prompts of the eval stream."""
        if self._eval_items is None:
            found: dict[str, Item] = {}
            for index in range(REDRAWS * self.num_eval):
                if len(found) == self.num_eval:
                    break
                item = self.draw("eval", index)
                found.setdefault(item.key(), item)
            if len(found) < self.num_eval:
                raise ConfigError(
                    f"environment.eval_items = {self.num_eval} different held-out prompts are wanted, but "
                    f"{REDRAWS * self.num_eval} draws gave only {len(found)}; lower it or widen "
                    "environment.args."
                )
            self._eval_items, self._eval_keys = list(found.values()), frozenset(found)
        return self._eval_items


def stable_seed(*parts: Any) -> int:
    """A 62-bit seed that depends on the parts alone, whatever the process, machine or hash seed."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def build_environment(config: EnvironmentConfig, seed: int) -> Environment:
    """The environment that ``config.name`` names, with its held-out items already drawn.

    Raises:
        ConfigError: unknown name, wrong arguments, unreadable file, a task that is too small.
    """
    _check_limits(config)
    kind, _, task = config.name.partition(":")
    if kind == "reasoning_gym":
        from torchspec.data.reasoning_gym import ReasoningGym

        environment: Environment = ReasoningGym(task, config.args, config.questions_per_prompt)
    elif config.name == "jsonl":
        from torchspec.data.jsonl import JsonlEnvironment

        if config.args:
            raise ConfigError(f"environment.args = {config.args} has no meaning with environment.name = 'jsonl'.")
        environment = JsonlEnvironment(config.path, config.scorer)
    else:
        environment = _load_class(config)
    if config.questions_per_prompt != 1 and kind != "reasoning_gym":
        raise ConfigError(
            f"environment.questions_per_prompt = {config.questions_per_prompt} has a meaning only with "
            "environment.name = 'reasoning_gym:TASK'."
        )
    if config.path and config.name != "jsonl":
        raise ConfigError(f"environment.path = '{config.path}' is read only with environment.name = 'jsonl'.")
    environment.bind(seed, config.eval_items)
    environment._held_out()
    return environment


def _load_class(config: EnvironmentConfig) -> Environment:
    """The user's class, constructed with ``environment.args``."""
    from torchspec.plugins import load_object

    if ":" not in config.name:
        raise ConfigError(
            f"environment.name = '{config.name}' is unknown. It is 'reasoning_gym:TASK', 'jsonl', "
            "'module:Class' or 'path/to/file.py:Class'."
        )
    cls = load_object(config.name)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise ConfigError(
            f"environment.name = '{config.name}' is a {type(cls).__name__}, but a subclass of "
            "torchspec.data.environments.Environment is needed."
        )
    try:
        return cls(**config.args)
    except TypeError as error:
        raise ConfigError(f"environment.args does not suit {config.name}: {error}.") from error


def _check_limits(config: EnvironmentConfig) -> None:
    if not config.scorer_timeout_s > 0:
        raise ConfigError(f"environment.scorer_timeout_s = {config.scorer_timeout_s} must be above 0.")
    if not 0 <= config.max_failed_share <= 1:
        raise ConfigError(f"environment.max_failed_share = {config.max_failed_share} must lie between 0 and 1.")
