"""Calling scorers: a time limit for each call, failures counted, and fatal when they are many.

The limit really ends a scorer that loops for ever:
- in the main thread a timer signal (ITIMER_REAL, SIGALRM) raises inside the call, again every second in case
  the scorer swallows the exception. The handler and the timer that stood before are put back.
- in any other thread, where Python runs no signal handlers, the call runs in a helper thread; when it
  overruns, an exception is raised inside that thread between two of its bytecodes, and it is left behind (a
  daemon) if that too is swallowed.
Neither can end a single call into C code that never comes back to the interpreter and holds its lock (a huge
integer power, say); a scorer that may do that should run its work in a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from torchspec.errors import RunError

if TYPE_CHECKING:
    from torchspec.data.environments import Environment, Item

REPEAT_S = 1.0


class ScorerFailure(RunError):
    """Too many scorer calls of one step failed."""


class _Overrun(BaseException):
    """Raised inside a scorer whose time is over. No Exception, so ``except Exception`` lets it pass."""


@dataclass
class ScoreBatch:
    """Scores of a list of responses, in its order.

    Attributes:
        rewards: one finite number each; 0.0 where the call failed.
        components: one dict each; empty where the scorer returned a plain number, or failed.
        failed: calls that raised, overran or returned something that is no finite number.
        first_error: a sentence on the first of these, None when there was none.
    """

    rewards: list[float] = field(default_factory=list)
    components: list[dict[str, float]] = field(default_factory=list)
    failed: int = 0
    first_error: str | None = None


def score_all(
    environment: Environment,
    pairs: Sequence[tuple[Item, str]],
    *,
    timeout_s: float = 10.0,
    max_failed_share: float = 0.2,
) -> ScoreBatch:
    """Score (item, response text) pairs one after another.

    Raises:
        ScorerFailure: more than ``max_failed_share`` of the calls failed; the message carries the first
            error.
    """
    batch = ScoreBatch()
    for item, response in pairs:
        try:
            reward, components = read_score(
                call_with_timeout(functools.partial(environment.score, item, response), timeout_s)
            )
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a scorer raises is counted, and fatal below when it is frequent
            batch.failed += 1
            if batch.first_error is None:
                what = str(error) if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
                batch.first_error = f"{what} (response {_short(response)} to prompt {_short(item.key())})"
            reward, components = 0.0, {}
        batch.rewards.append(reward)
        batch.components.append(components)
    if batch.failed > max_failed_share * len(pairs):
        raise ScorerFailure(
            f"{batch.failed} of {len(pairs)} scorer calls failed, more than environment.max_failed_share = "
            f"{max_failed_share} allows. The first: {batch.first_error}."
        )
    return batch


def read_score(value: Any) -> tuple[float, dict[str, float]]:
    """A scorer's return value as (reward, components): a number, or a dict of numbers.

    The reward of a dict is its entry "reward" if it has one (not a component then), else the sum of its
    entries.

    Raises:
        TypeError, ValueError: the value is neither, a number is not finite, or the dict is empty.
    """
    if not isinstance(value, dict):
        return _number(value, "the score"), {}
    if not value:
        raise ValueError("the scorer returned an empty dict; it needs at least one number")
    components = {str(name): _number(number, f"the component '{name}'") for name, number in value.items()}
    if "reward" in components:
        return components.pop("reward"), components
    return math.fsum(components.values()), components


def _number(value: Any, what: str) -> float:
    # numpy's and torch's scalars are no numbers.Real, all of them, but say what they are by __float__.
    if not isinstance(value, Real) and not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {value!r}, a {type(value).__name__}; a number or a dict of numbers is needed")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, which is not finite")
    return number


def call_with_timeout(function: Callable[[], Any], timeout_s: float) -> Any:
    """``function()``, ended after ``timeout_s`` seconds (see the top of this file for how).

    Raises:
        TimeoutError: the time was over, whatever the function then returned or raised.
    """
    in_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    return (_call_with_alarm if in_main else _call_in_thread)(function, timeout_s)


def _call_with_alarm(function: Callable[[], Any], timeout_s: float) -> Any:
    armed, fired = True, False

    def on_alarm(number: int, frame: Any) -> None:
        nonlocal fired
        if armed:  # an alarm that arrives while the call is being left must not disturb the clean-up
            fired = True
            raise _Overrun

    started = time.monotonic()
    old_handler = signal.signal(signal.SIGALRM, on_alarm)
    old_left, old_interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, REPEAT_S)
    result = None
    try:
        try:
            result = function()
        finally:
            armed = False
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        if not fired:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        if old_left:  # a test runner's watchdog, say: it goes on as if nothing had been
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, old_left - (time.monotonic() - started)), old_interval)
    if fired:
        raise TimeoutError(_overran(timeout_s))
    return result


def _call_in_thread(function: Callable[[], Any], timeout_s: float) -> Any:
    outcome: list[tuple[bool, Any]] = []

    def work() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as error:  # handed to the caller below
            outcome.append((False, error))

    thread = threading.Thread(target=work, name="torchspec-scorer", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Overrun))
        raise TimeoutError(_overran(timeout_s))
    succeeded, value = outcome[0]
    if succeeded:
        return value
    raise value


def _overran(timeout_s: float) -> str:
    return f"the scorer ran longer than environment.scorer_timeout_s = {timeout_s} seconds"


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
