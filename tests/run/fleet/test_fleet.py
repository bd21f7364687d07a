"""The driver's watch over the processes of a run, with stand-ins for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hwrl.errors import EngineError
from hwrl.run.fleet import Fleet


class SavingTrainers:
    """A rank whose close returns after ``polls`` polls; a checkpoint is being saved in the background meanwhile."""

    def __init__(self, polls: int) -> None:
        self.left, self.log = polls, list[str]()

    def begin_close(self) -> list[str]:
        return ["rank"]

    def are_saving(self) -> bool:
        self.left -= 1
        self.log.append("saving")
        return True

    def kill(self) -> None:
        self.log.append("killed")

    def wait(self, answers: list[str], *, timeout: float, num_returns: int = 1) -> tuple[list[str], list[str]]:
        """Take the place of ``ray.wait``."""
        ready = self.left <= 0
        return ([], answers) if not ready else (answers, [])

    @contextlib.contextmanager
    def waiting_for(self, subject: str) -> Iterator[None]:
        self.log.append(subject)
        yield
        self.log.append("waited")


@pytest.mark.parametrize(
    ("error", "limit_s", "polls"),
    [(EngineError("broken"), 600.0, 3), (EngineError("broken"), 0.0, 0), (KeyboardInterrupt(), 600.0, 0)],
    ids=["waits", "limit", "at once"],
)
def test_closing_waits_for_a_checkpoint_in_the_background(
    error: BaseException, limit_s: float, polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, raised = SavingTrainers(3), EngineError("the save failed")

    def raise_error(answer: str) -> None:
        raise raised

    monkeypatch.setattr("hwrl.run.fleet.ray", SimpleNamespace(wait=trainers.wait))
    monkeypatch.setattr("hwrl.run.fleet.value_of", raise_error)
    nothing = SimpleNamespace(finish=int, update=int, begin_stop=list, kill=int, close=int)
    fleet = SimpleNamespace(
        _config=SimpleNamespace(timeouts=SimpleNamespace(trainer_s=limit_s)),
        _monitor=nothing,
        _devices=nothing,
        trainers=trainers,
        replicas=nothing,
        ledger=SimpleNamespace(remote=nothing),
        waits=trainers,
    )
    if polls:
        with pytest.raises(EngineError, match="the save failed"):
            Fleet.close(cast(Any, fleet), after=error)
    else:
        Fleet.close(cast(Any, fleet), after=error)
    assert trainers.log.count("saving") == (polls or int(limit_s == 0.0))
    assert trainers.log[-1] == "killed", "the ranks were killed before the wait"
    waits = [line for line in trainers.log if line.startswith("a checkpoint in the background")]
    assert waits == ([] if isinstance(error, KeyboardInterrupt) else [WAIT.format(limit_s)])


WAIT = "a checkpoint in the background (limit timeouts.trainer_s={:g} s)"
