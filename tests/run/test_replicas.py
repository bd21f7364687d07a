"""The replicas of a run, with stand-ins for their processes and for the ledger."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hwrl.errors import InputChangedError
from hwrl.run.config import parse_config
from hwrl.run.fleet.replicas import Replicas


class StandInHandle:
    """The process of a replica. Its answers are its errors, or None."""

    set_up_errors: tuple[Exception | None, ...] = ()
    handles: tuple[StandInHandle, ...] = ()

    def __init__(self) -> None:
        start = len(StandInHandle.handles)
        StandInHandle.handles += (self,)
        self.set_up_answer = (f"set up {start}", StandInHandle.set_up_errors[start])
        self.run_answer = (f"run {start}", None)
        self.killed = False

    def set_up(self, *arguments: Any, **keywords: Any) -> Any:
        return self.set_up_answer

    def run(self) -> Any:
        return self.run_answer

    def kill(self) -> None:
        self.killed = True


def value_of(answer: tuple[str, Exception | None]) -> None:
    if answer[1] is not None:
        raise answer[1]


def ignore(*arguments: Any) -> Any:
    """Take the place of a call without an effect here."""
    return 0


def replicas_of(monkeypatch: pytest.MonkeyPatch, *set_up_errors: Exception | None) -> Replicas:
    """Return one replica of a run, whose starts have these errors. Its set-up may take 0.1 s."""
    monkeypatch.setattr("hwrl.run.fleet.replicas.ReplicaHandle", StandInHandle)
    monkeypatch.setattr("hwrl.run.fleet.replicas.value_of", value_of)
    monkeypatch.setattr("hwrl.run.fleet.replicas.why_ended", lambda answer: "killed")
    monkeypatch.setattr(StandInHandle, "set_up_errors", set_up_errors)
    monkeypatch.setattr(StandInHandle, "handles", ())
    config = parse_config(
        {
            "dir": "run",
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "reward": {"function": "m:f"},
            "timeouts": {"start_s": 0.1},
        }
    )
    devices = SimpleNamespace(replicas=["replica-0"], ray_options=lambda name: {}, check_report=ignore, forget=ignore)
    ledger = SimpleNamespace(handle=None, forget=ignore, expire_overdue=list)
    monitor = SimpleNamespace(watch=ignore, forget=ignore, locate=str, loop_turn_s=lambda name: 0.0)
    return Replicas(
        config,
        devices=cast(Any, devices),
        ledger=cast(Any, ledger),
        monitor=cast(Any, monitor),
        setup_of=ignore,
        seed=1,
        log=ignore,
    )


def test_a_replacement_that_found_a_changed_input_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = InputChangedError("train.jsonl changed during the run", why="an edit", fix="restore it")
    replicas = replicas_of(monkeypatch, None, refusal, refusal)
    replicas.start()
    replicas.handle_event(replicas.answers[0])  # it is set up
    replicas.handle_event(replicas.answers[0])  # it has died
    replicas.handle_event(replicas.answers[0])  # its replacement refuses to start
    time.sleep(0.12)  # the limit itself, not a wait for something
    replicas.restart_late()
    assert len(StandInHandle.handles) == 2 and StandInHandle.handles[1].killed
    assert replicas.refused and not replicas.are_being_set_up and replicas.answers == []
    with pytest.raises(InputChangedError, match="changed during the run"):
        replicas.raise_refusal()
