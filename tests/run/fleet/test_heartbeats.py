"""Heartbeats, and the words for what was lost."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray.exceptions
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

from hwrl.run.monitor import ProcessMonitor
from hwrl.run.remote import HeartbeatReply, keep_warnings, take_warnings, why_died


class Reachable:
    """An actor whose answers are values or errors, ready at once; the clock goes on by a second with each look."""

    def __init__(self, *answers: HeartbeatReply | Exception) -> None:
        self._answers = list(answers)

    def ping(self) -> Any:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def value_of(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))  # Ray's threads need the real one
    monkeypatch.setattr("hwrl.run.monitor.time", clock)
    monkeypatch.setattr("hwrl.run.monitor.is_ready", lambda answer: True)
    monkeypatch.setattr("hwrl.run.monitor.value_of", value_of)


def test_an_error_instead_of_an_answer_is_silence_until_the_next_answer(looks: None) -> None:
    lost = ActorUnavailableError("its machine is cut off", None)
    log: list[str] = []
    monitor = ProcessMonitor(heartbeat_s=6.0, log=lambda text, **kind: log.append(text), names_hosts=True)
    monitor.watch(
        "replica-0", cast(Any, Reachable(HeartbeatReply("host1"), *[lost] * 6, HeartbeatReply("host1"), lost))
    )
    silent = []
    for _ in range(30):
        monitor.update()
        silent.append(list(monitor.unresponsive()))
    back = silent.index([], silent.index(["replica-0"]))
    assert silent[0] == [] and back < len(silent) - 1 and silent[-1] == ["replica-0"]
    assert log[0].startswith("waiting for replica-0 on host1: no answer for ")
    assert any("replica-0 on host1 answers again" in line for line in log)


def test_each_warning_of_a_process_is_logged_once_with_the_first_process_that_has_it(looks: None) -> None:
    log: list[str] = []
    monitor = ProcessMonitor(heartbeat_s=60.0, log=log.append)
    first, second = HeartbeatReply("h", warnings=("train: padded rows",)), HeartbeatReply("h", warnings=("a: b",))
    monitor.watch("trainer rank 0", cast(Any, Reachable(first, first, second)))
    monitor.watch("trainer rank 1", cast(Any, Reachable(first)))
    for _ in range(10):
        monitor.update()
    assert log == ["warning: trainer rank 0: train: padded rows", "warning: trainer rank 0: a: b"]
    many = tuple(map(str, range(1000)))
    monitor.watch("replica-0", cast(Any, Reachable(HeartbeatReply("h", warnings=many))))
    monitor.update()
    assert len(log) == 501 and log[-1] == "further warnings are not shown"


class BadRepr:
    def __repr__(self) -> str:
        raise ValueError("no repr")


def test_a_process_keeps_its_last_warnings_whoever_logs_them() -> None:
    factory = logging.getLogRecordFactory()
    try:
        keep_warnings()
        quiet = logging.getLogger("tests.quiet")
        quiet.propagate, quiet.handlers = False, [logging.NullHandler()]
        quiet.warning("padded\n  %s", "rows")
        quiet.info("not this")
        quiet.error("%r", BadRepr())
        quiet.warning("x" * 10_000)
        first, second, third = take_warnings()
        assert (first, second) == ("tests.quiet: padded rows", "tests.quiet: %r") and len(third) == 500
        for number in range(1000):
            quiet.warning("%d", number)
        assert take_warnings()[-1] == "tests.quiet: 999" and take_warnings() == ()
    finally:
        logging.setLogRecordFactory(factory)


def test_a_machine_is_named_on_a_cluster_only(looks: None) -> None:
    for several, named in ((True, "replica-0 on host1"), (False, "replica-0")):
        monitor = ProcessMonitor(heartbeat_s=6.0, log=print, names_hosts=several)
        monitor.watch("replica-0", cast(Any, Reachable(HeartbeatReply("host1"))))
        assert monitor.locate("replica-0") == "replica-0", "before the first answer"
        monitor.update()
        assert monitor.locate("replica-0") == named


def test_the_loss_of_a_machine_or_of_memory_is_told_in_its_words() -> None:
    context = ray.core.generated.common_pb2.ActorDiedErrorContext
    dead = (
        "The actor died because its node has died. Node Id: 12ab\n\tthe actor's node was terminated unexpectedly: lost"
    )
    assert why_died(ActorDiedError(context(error_message=dead, actor_id=bytes(16)))) == "its machine was lost"
    full = "Task was killed due to the node running low on memory.\nMemory on the node was 15 GB / 15 GB"
    assert why_died(OutOfMemoryError(full)) == "its machine ran out of memory, and Ray killed it"
    assert why_died(ActorDiedError()) == "The actor died unexpectedly before finishing this task."
