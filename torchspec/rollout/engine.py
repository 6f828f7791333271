"""What a rollout engine is, without torch and without vLLM: requests, completions, statistics, errors, the protocol.

Token ids go in and token ids come out; text never does. A response ends with the sampled end token (finish reason
"stop", the end token is part of token_ids) or at its length limit ("length").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchspec.errors import ConfigError, Interrupted, RunError
from torchspec.rollout.config import SamplingConfig

if TYPE_CHECKING:
    from torch import Tensor


class EngineError(RunError):
    """The engine cannot do what was asked: a request that does not fit, weights that do not belong, a broken refit."""


class RolloutDeadline(RunError):
    """The rollout took longer than its deadline. The message says what was unfinished."""


class RolloutInterrupted(Interrupted):
    """``should_stop`` ended the rollout. Its responses are dropped."""


@dataclass
class Request:
    """One response to draw."""

    prompt_ids: list[int]
    seed: int
    """Of this request's own random stream, in [0, 2**63); see request_seed."""


@dataclass
class Completion:
    """One response drawn."""

    token_ids: list[int]
    """The sampled tokens, the end token included."""
    logprobs: list[float]
    """log p of each token under the distribution that it was drawn from (temperature, top-p and top-k applied; at
    temperature 0 the model's own distribution). Empty when they were not asked for."""
    finish_reason: Literal["stop", "length"]
    num_drafts: int = 0
    """Verification steps that had draft tokens to verify."""
    num_accepted: int = 0
    """Draft tokens accepted in them (a stop token can cut the last few off)."""


@dataclass
class SpecStats:
    """What speculation did: cumulative counts since the engine was built. Subtract two to get a rollout's."""

    drafts: int = 0
    """Verification steps."""
    draft_tokens: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens accepted."""
    accepted_per_pos: list[int] = field(default_factory=list)
    """Of these, at each draft position; position i is reached only where all before it were accepted."""

    def __sub__(self, earlier: SpecStats) -> SpecStats:
        before = earlier.accepted_per_pos or [0] * len(self.accepted_per_pos)
        return SpecStats(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            [now - then for now, then in zip(self.accepted_per_pos, before, strict=True)],
        )

    def copy(self) -> SpecStats:
        return SpecStats(self.drafts, self.draft_tokens, self.accepted, list(self.accepted_per_pos))


def no_stop() -> bool:
    """A ``should_stop`` that never stops."""
    return False


def no_progress(done: int, tokens: int) -> None:
    """An ``on_progress`` that shows nothing."""


class Engine(Protocol):
    """Serves a policy with its draft, and takes new weights for both."""

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        *,
        deadline_s: float,
        should_stop: Callable[[], bool] = no_stop,
        on_progress: Callable[[int, int], None] = no_progress,
        return_logprobs: bool = True,
    ) -> list[Completion]:
        """Draw one completion per request, in the order of the requests.

        should_stop is asked before every engine step; on_progress gets (finished requests, tokens so far). However
        this ends, the engine is clean afterwards: nothing is queued, and the same request draws the same tokens.

        Raises:
            EngineError: a request that cannot be served; raised before anything is generated.
            RolloutInterrupted: should_stop answered True.
            RolloutDeadline: deadline_s seconds passed.
        """
        ...

    def refit(
        self,
        policy_weights: Iterable[tuple[str, Tensor]] | None,
        draft_weights: Iterable[tuple[str, Tensor]] | None,
        version: int,
    ) -> None:
        """Replace the weights of policy and draft (None keeps a model's) and stamp them with ``version``.

        The tensors are copied: the caller may change them afterwards.

        Raises:
            EngineError: a tensor is missing, unknown or misshaped (nothing was sent then), or the stamp read back is
                another one, or the prefix cache could not be emptied.
        """
        ...

    def version(self) -> int:
        """The stamp that the engine itself reports; -1 before the first refit."""
        ...

    def spec_stats(self) -> SpecStats:
        """Cumulative since the engine was built, over the requests that finished."""
        ...

    def sleep(self) -> None:
        """Free the engine's memory (GPU)."""
        ...

    def wake(self) -> None:
        """Take the memory back; both models must be refitted before the next generate. Nothing to do when awake."""
        ...

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        ...


def request_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """Seed of one request, in [0, 2**63): a hash, so that no two requests of a run share a random stream.

    Neighbouring integers would not do: engines derive further streams from a seed by adding small numbers to it.
    """
    text = f"torchspec request {run_seed} {step} {prompt} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def response_room(prompt_tokens: int, max_tokens: int, max_model_len: int, num_speculative_tokens: int) -> int:
    """Longest response that a prompt can have: at most max_tokens, and prompt + response + lookahead in the context.

    The lookahead is what the draft runs ahead, num_speculative_tokens + 1 (0 without speculation). Zero or less means
    that the prompt does not fit.
    """
    lookahead = num_speculative_tokens + 1 if num_speculative_tokens else 0
    return min(max_tokens, max_model_len - lookahead - prompt_tokens)


def check_sampling(sampling: SamplingConfig) -> None:
    """Refuse what no engine here can do (torchspec/validation.py refuses more, at config time, for training).

    Raises:
        ConfigError: min_p or logit_bias is set, or a number is out of its range.
    """
    if sampling.min_p or sampling.logit_bias:
        raise ConfigError(
            f"sampling.min_p = {sampling.min_p} and sampling.logit_bias = {sampling.logit_bias}: vLLM supports neither "
            "with speculative decoding; leave them at 0 and {}."
        )
    if (
        not 0 <= sampling.temperature <= 2
        or not 0 < sampling.top_p <= 1
        or sampling.top_k < 0
        or sampling.max_tokens < 1
    ):
        raise ConfigError(
            f"sampling is out of range: temperature = {sampling.temperature} (0 to 2, vLLM's limit), top_p = "
            f"{sampling.top_p} (above 0, at most 1), top_k = {sampling.top_k} (0 or more), max_tokens = "
            f"{sampling.max_tokens} (1 or more)."
        )


def generation_stop_ids(folder: str | Path) -> tuple[int, ...]:
    """The end tokens that a Hugging Face folder declares: eos_token_id (a number, a list, or null) of its
    generation_config.json, or of config.json where there is no such file, ascending."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            return _as_ids(read_json(path).get("eos_token_id"))
    return ()


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(sorted({value} if isinstance(value, int) else set(value)))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        EngineError: the file is missing, is no JSON, or holds something else than an object.
    """
    try:
        value = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}. vLLM needs a Hugging Face folder.") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path} holds a JSON {type(value).__name__} instead of an object.")
    return value
