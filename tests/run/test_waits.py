"""What a run says while it waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hwrl.run import waits
from hwrl.run.waits import WaitLog


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log_with(clock: Clock) -> tuple[WaitLog, list[str], Callable[..., None]]:
    said: list[str] = []
    log = WaitLog(said.append, clock=clock)

    def at(now_s: float, **silent: float) -> None:
        clock.now_s = now_s
        log.tell(silent, limit_s=60)

    return log, said, at


def test_a_long_wait_is_told_after_ten_seconds_and_each_time_it_has_doubled(clock: Clock) -> None:
    log, said, at = log_with(clock)
    with log.waiting_for("a batch"), log.waiting_for("the trainer's 'publish'"):
        for now_s in (1, 9, 10, 11, 19, 20, 39, 41):
            at(now_s)
    at(100)
    assert said == [f"waiting for the trainer's 'publish' for {waited_s} s" for waited_s in (10, 20, 41)]


def test_a_wait_as_long_as_usual_is_not_told(clock: Clock) -> None:
    log, said, at = log_with(clock)
    for begin_s in (0, 100):
        clock.now_s = begin_s
        with log.waiting_for("the trainer's 'step'"):
            at(begin_s + 15)
    clock.now_s = 200
    with log.waiting_for("the trainer's 'step'"):
        at(229)
        at(231)
    assert said == ["waiting for the trainer's 'step' for 15 s", "waiting for the trainer's 'step' for 31 s"]


def test_a_silent_process_is_told_and_so_is_its_return(clock: Clock) -> None:
    _, said, at = log_with(clock)
    for second, silent_s in enumerate((0, 5, waits.FIRST_S, 12, 0, 0)):
        at(second, **{"replica-0": silent_s})
    assert said == [
        "waiting for replica-0, which has not answered for 10 s, at most 60 s",
        "replica-0 answers again, after more than 10 s",
    ]
