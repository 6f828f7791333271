"""Tasks of the reasoning-gym package (0.1.25), with their own scorers.

reasoning-gym generates item i of a data set from (its seed + i), and some of its tasks make all items of a
data set at construction. So a stream is cut into chunks of ``CHUNK`` items, each chunk a small data set with
a seed of its own; that makes every task endless, and any item can be had without those before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import math
import random
import typing
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torchspec.data.environments import Environment, Item, stable_seed
from torchspec.errors import ConfigError

CHUNK = 256
CHUNKS_KEPT = 8
# numpy's legacy generators, which some tasks use, take seeds below 2^32; the item's number is added to this.
SEED_RANGE = 2**32 - 2**16


class ReasoningGym(Environment):
    """One reasoning-gym task.

    Args:
        task: its name, such as "spell_backward".
        args: settings of the task, the fields of its configuration without ``seed`` and ``size``. A field of
            an Enum type takes the Enum's value (``transformation = "lowercase"``).
        questions: questions in one prompt, one a line. The answers are then expected one a line too, in the
            same order, and the score is the mean of reasoning-gym's scores of the lines; a missing line
            scores 0, and with more lines than questions the mean is over the lines. Makes long responses out
            of tasks with short prompts.

    Raises:
        ConfigError: unknown task or setting, or one that the task refuses.
    """

    def __init__(self, task: str, args: dict[str, Any], questions: int = 1) -> None:
        from reasoning_gym.factory import DATASETS

        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" There are: {', '.join(sorted(DATASETS))}."
            raise ConfigError(f"environment.name: reasoning-gym has no task '{task}'.{hint}")
        if questions < 1:
            raise ConfigError(f"environment.questions_per_prompt = {questions} must be 1 or more.")
        self.task = task
        self.questions = questions
        self.args = _checked_args(task, DATASETS[task][1], args)
        self._chunks: OrderedDict[tuple[int, str, int], Any] = OrderedDict()

    def draw(self, stream: str, index: int) -> Item:
        if self.questions == 1:
            entry = self._entry(stream, index)
            answer = entry["answer"]
            return Item(prompt=entry["question"], answer=None if answer is None else str(answer), row=entry)
        entries = [self._entry(stream, index * self.questions + i) for i in range(self.questions)]
        answers = [entry["answer"] for entry in entries]
        if any(answer is None or "\n" in str(answer) for answer in answers):
            raise ConfigError(
                f"environment.questions_per_prompt = {self.questions} wants answers of one line each, but "
                f"'{self.task}' has {next(a for a in answers if a is None or chr(10) in str(a))!r}."
            )
        return Item(
            prompt="\n".join(entry["question"] for entry in entries),
            answer="\n".join(map(str, answers)),
            row={"entries": entries},
        )

    def score(self, item: Item, response: str) -> float:
        """reasoning-gym's own score of ``final_answer(response)``."""
        answer = final_answer(response)
        dataset = next(reversed(self._chunks.values())) if self._chunks else self._dataset(0, "score", 0)
        if self.questions == 1:
            return dataset.score_answer(answer, entry=item.row)
        lines, entries = answer.split("\n"), item.row["entries"]
        scores = [dataset.score_answer(line.strip(), entry=entry) for line, entry in zip(lines, entries)]
        return math.fsum(scores) / max(len(lines), len(entries))

    def _entry(self, stream: str, index: int) -> dict[str, Any]:
        """Question ``index`` of the stream as reasoning-gym gives it: question, answer, metadata."""
        chunk, offset = divmod(index, CHUNK)
        seed = stable_seed(self.seed, self.task, stream, chunk) % SEED_RANGE
        with _global_generators(seed + offset):
            try:
                return self._dataset(seed, stream, chunk)[offset]
            except Exception as error:  # the tasks check their settings by assert, or just fail on them
                raise ConfigError(
                    f"reasoning-gym refuses environment.args = {self.args} for '{self.task}': "
                    f"{type(error).__name__}: {error}."
                ) from error

    def _dataset(self, seed: int, stream: str, chunk: int) -> Any:
        """The data set of a chunk; the last few are kept, since prompts are asked for in order."""
        key = (seed, stream, chunk)
        if key not in self._chunks:
            import reasoning_gym

            self._chunks[key] = reasoning_gym.create_dataset(self.task, size=CHUNK, seed=seed, **self.args)
            if len(self._chunks) > CHUNKS_KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]


def final_answer(response: str) -> str:
    """What stands between the last ``<answer>`` and its ``</answer>``, else the whole response; stripped.

    ``environment.system_prompt`` can ask for these tags when the policy should think first.
    """
    _, opened, rest = response.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return (inside if opened and closed else response).strip()


def _checked_args(task: str, config_class: type, args: dict[str, Any]) -> dict[str, Any]:
    """``args`` with Enum values made Enums; unknown names are refused with the nearest right one."""
    known = [f.name for f in dataclasses.fields(config_class) if f.init]
    hints = typing.get_type_hints(config_class)
    checked = {}
    for name, value in args.items():
        if name in ("seed", "size"):
            raise ConfigError(
                f"environment.args.{name} cannot be set: items follow from the run's seed, and the stream is endless."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else ""
            settings = ", ".join(n for n in known if n not in ("seed", "size"))
            raise ConfigError(f"environment.args.{name}: '{task}' has no such setting. {hint} It has: {settings}.")
        kind = hints.get(name)
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and not isinstance(value, kind):
            values = [member.value for member in kind]
            if value not in values:
                raise ConfigError(f"environment.args.{name} = {value!r} must be one of {values}.")
            value = kind(value)
        checked[name] = value
    return checked


@contextlib.contextmanager
def _global_generators(seed: int) -> Iterator[None]:
    """Seed Python's and numpy's global generators for a moment: a few tasks draw from them."""
    import numpy

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
