"""The log of long waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hwrl.run.monitor import FIRST_S, WaitLog


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
        log.note_progress()
        with log.waiting_for("a training step"):
            at(begin_s + 15)
    clock.now_s = 200
    log.note_progress()
    with log.waiting_for("a training step"):
        at(229)
        at(231)
    assert logged == ["waiting for a training step for 15 s", "waiting for a training step for 31 s"]


def silences_s(logged: list[str], at: Callable[..., None], clock: Clock, seconds: int) -> list[float]:
    """Let so many seconds pass; return how long the log was silent before each of its lines."""
    begin_s = last_s = clock.now_s
    silences = []
    for now_s in (begin_s + second for second in range(seconds)):
        count = len(logged)
        at(now_s)
        if len(logged) > count:
            silences.append(now_s - last_s)
            last_s = now_s
    return silences


@pytest.mark.parametrize("earlier_s", [0.0, 700.0], ids=["first", "usual"])
def test_no_wait_is_silent_for_a_minute(clock: Clock, earlier_s: float) -> None:
    log, logged, at = log_with(clock)
    with log.waiting_for("a batch"):
        clock.now_s += earlier_s
    log.note_progress()
    with log.waiting_for("a batch"):
        silences = silences_s(logged, at, clock, 300)
    assert silences == ([55.0] * 5 if earlier_s else [10.0, 10.0, 20.0, 40.0, 55.0, 55.0, 55.0])


def test_usual_waits_one_after_another_are_not_silent_for_a_minute(clock: Clock) -> None:
    log, logged, at = log_with(clock)
    for subject in ("a batch", "a training step"):
        with log.waiting_for(subject):
            clock.now_s += 40.0
    log.note_progress()
    for subject in ("a batch", "a training step"):
        with log.waiting_for(subject):
            silences_s(logged, at, clock, 41)
    assert logged == ["waiting for a training step for 15 s"]


def test_a_run_that_shows_its_steps_logs_no_short_waits(clock: Clock) -> None:
    log, logged, at = log_with(clock)
    for _ in range(100):
        with log.waiting_for("a training step"):
            silences_s(logged, at, clock, 9)
        log.note_progress()
    assert logged == []


def test_a_silent_process_is_logged_and_so_is_its_return(clock: Clock) -> None:
    _, logged, at = log_with(clock)
    for second, silent_s in enumerate((0, 5, FIRST_S, 12, 0, 0)):
        at(second, **{"replica-0": silent_s})
    assert logged == [
        "waiting for replica-0: no answer for 10 s (limit 60 s)",
        "replica-0 answers again, after more than 10 s",
    ]
