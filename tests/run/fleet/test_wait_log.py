"""The log of long waits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from hwrl.run.fleet.wait_log import FIRST_S, WaitLog


class Clock:
    """A clock under the control of a test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log_with(clock: Clock) -> tuple[WaitLog, list[str], Callable[..., None]]:
    logged: list[str] = []
    log = WaitLog(logged.append, clock=clock)

    def at(now_s: float, **silent: float) -> None:
        clock.now_s = now_s
        log.update(silent, limit_s=60)

    return log, logged, at


def test_a_long_wait_is_logged_after_ten_seconds_and_when_it_has_doubled(clock: Clock) -> None:
    log, logged, at = log_with(clock)
    with log.waiting_for("a batch"), log.waiting_for("the trainer to send weights"):
        for now_s in (1, 9, 10, 11, 19, 20, 39, 41):
            at(now_s)
    at(100)
    assert logged == [f"waiting for the trainer to send weights for {waited_s} s" for waited_s in (10, 20, 41)]


def test_a_wait_as_long_as_usual_is_not_logged(clock: Clock) -> None:
    log, logged, at = log_with(clock)
    for begin_s in (0, 100):
        clock.now_s = begin_s
        with log.waiting_for("a training step"):
            at(begin_s + 15)
    clock.now_s = 200
    with log.waiting_for("a training step"):
        at(229)
        at(231)
    assert logged == ["waiting for a training step for 15 s", "waiting for a training step for 31 s"]


@pytest.mark.parametrize("earlier_s", [0.0, 700.0], ids=["first", "usual"])
def test_no_wait_is_silent_for_a_minute(clock: Clock, earlier_s: float) -> None:
    log, logged, at = log_with(clock)
    with log.waiting_for("a batch"):
        clock.now_s += earlier_s
    began_s, logged_s = clock.now_s, [0.0]
    with log.waiting_for("a batch"):
        for waited_s in range(1000):
            count = len(logged)
            at(began_s + waited_s)
            logged_s += [waited_s] * (len(logged) - count)
    gaps_s = [later - earlier for earlier, later in pairwise([*logged_s, 1000.0])]
    assert max(gaps_s) < 60 and len(gaps_s) < 25


def test_a_process_is_not_silent_for_a_minute_without_a_line(clock: Clock) -> None:
    _, logged, at = log_with(clock)
    for silent_s in range(200):
        at(silent_s, **{"replica-0": silent_s})
    assert [line.split()[6] for line in logged] == ["10", "20", "40", "80", "135", "190"]


def test_a_silent_process_is_logged_and_so_is_its_return(clock: Clock) -> None:
    _, logged, at = log_with(clock)
    for second, silent_s in enumerate((0, 5, FIRST_S, 12, 0, 0)):
        at(second, **{"replica-0": silent_s})
    assert logged == [
        "waiting for replica-0: no answer for 10 s (limit 60 s)",
        "replica-0 answers again, after more than 10 s",
    ]
