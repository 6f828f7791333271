"""Scorers that raise, overrun or return nonsense: ended, counted, and fatal above a share."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time

import pytest

from torchspec.data.environments import Environment, Item, ScorerFailure, score_all
from torchspec.data.scoring import call_with_timeout, read_score

ITEM = Item(prompt="p", answer="a")


class Scripted(Environment):
    """Scores by calling the function that the response names."""

    def __init__(self, **functions):
        self.functions = functions

    def score(self, item, response):
        return self.functions[response]()


def spin():
    while True:
        pass


def stubborn():
    """Swallows the first exceptions that should end it."""
    swallowed = 0
    while True:
        try:
            while True:
                pass
        except BaseException:
            swallowed += 1
            if swallowed == 2:
                raise


def divide():
    return 1 / 0


def run(environment, responses, **limits):
    return score_all(
        environment, [(ITEM, r) for r in responses], **({"timeout_s": 5.0, "max_failed_share": 1.0} | limits)
    )


def test_rewards_and_components_keep_the_order():
    environment = Scripted(
        number=lambda: 0.25,
        integer=lambda: 1,
        true=lambda: True,
        summed=lambda: {"right": 0.5, "short": -0.125},
        total=lambda: {"right": 0.5, "reward": 2.0},
    )
    batch = run(environment, ["summed", "number", "total", "integer", "true"])
    assert batch.rewards == [0.375, 0.25, 2.0, 1.0, 1.0]
    assert batch.components == [{"right": 0.5, "short": -0.125}, {}, {"right": 0.5}, {}, {}]
    assert (batch.failed, batch.first_error) == (0, None)


@pytest.mark.parametrize("value", [None, "1.0", math.nan, math.inf, {}, {"a": math.nan}, {"a": None}, [1.0]])
def test_what_is_no_finite_number_is_a_failure(value):
    batch = run(Scripted(bad=lambda: value, good=lambda: 1.0), ["good", "bad"])
    assert batch.rewards == [1.0, 0.0] and batch.failed == 1


def test_numpy_and_torch_scalars_are_numbers():
    import numpy
    import torch

    assert read_score(numpy.float32(0.5)) == (0.5, {})
    assert read_score({"a": torch.tensor(0.5)}) == (0.5, {"a": 0.5})


def test_failures_are_counted_and_fatal_above_the_share():
    environment = Scripted(bad=divide, good=lambda: 1.0)
    batch = run(environment, ["good", "bad", "good", "good"], max_failed_share=0.25)
    assert batch.rewards == [1.0, 0.0, 1.0, 1.0] and batch.failed == 1
    with pytest.raises(ScorerFailure, match=r"2 of 4 .*0.25.*ZeroDivisionError: division by zero.*'bad'.*'p'"):
        run(environment, ["good", "bad", "good", "bad"], max_failed_share=0.25)
    with pytest.raises(ScorerFailure):
        run(environment, ["good", "bad"], max_failed_share=0.0)
    assert run(environment, [], max_failed_share=0.0).rewards == []


@pytest.mark.parametrize("loop, limit", [(spin, 1.0), (stubborn, 3.5)])
def test_an_endless_scorer_is_ended_and_the_next_call_is_unharmed(loop, limit):
    environment = Scripted(loop=loop, sleep=lambda: time.sleep(60), good=lambda: 1.0)
    started = time.monotonic()
    batch = run(environment, ["loop", "good"], timeout_s=0.1)
    assert time.monotonic() - started < limit
    assert batch.rewards == [0.0, 1.0] and batch.failed == 1
    assert "longer than environment.scorer_timeout_s = 0.1" in batch.first_error
    assert run(environment, ["sleep"], timeout_s=0.1).failed == 1


def test_a_scorer_that_swallows_the_alarm_and_returns_still_overran():
    def swallow():
        try:
            while True:
                pass
        except BaseException:
            return 1.0

    assert run(Scripted(swallow=swallow), ["swallow"], timeout_s=0.05).failed == 1


@pytest.mark.parametrize("loop", [spin, stubborn])
def test_an_endless_scorer_in_another_thread(loop):
    outcome = []

    def work():
        outcome.append(run(Scripted(loop=loop, good=lambda: 1.0, bad=divide), ["loop", "good", "bad"], timeout_s=0.2))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert outcome[0].rewards == [0.0, 1.0, 0.0] and outcome[0].failed == 2
    if loop is spin:  # ended, not only left behind to burn a core
        deadline = time.monotonic() + 10
        while any(t.name == "torchspec-scorer" for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(t.name == "torchspec-scorer" for t in threading.enumerate())


def test_handler_and_timer_that_stood_before_are_put_back():
    rang = []
    old = signal.signal(signal.SIGALRM, lambda *a: rang.append(time.monotonic()))
    old_left, old_interval = signal.setitimer(signal.ITIMER_REAL, 0.5)
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            call_with_timeout(spin, 0.1)
        assert call_with_timeout(lambda: 3, 5.0) == 3
        while not rang and time.monotonic() - started < 5:
            time.sleep(0.01)
        assert 0.4 < rang[0] - started < 1.5
    finally:
        signal.signal(signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, old_left, old_interval)


def test_a_scorer_that_exits_is_a_failure():
    batch = run(Scripted(leaves=lambda: sys.exit(3), good=lambda: 1.0), ["leaves", "good"], max_failed_share=0.5)
    assert batch.failed == 1 and batch.rewards == [0.0, 1.0] and "SystemExit: 3" in batch.first_error


def test_an_interrupt_is_not_a_failure():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Scripted(interrupt=interrupt), ["interrupt"])
