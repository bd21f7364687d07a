"""Environments of episodes that are cancelled: each is closed once, and not while it makes a step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hwrl.interfaces import Sampling
from hwrl.rollout import PolicyClient, Prompt
from hwrl_workflows import environment, environments
from tests.support.agents import chatml_policy


class Stage:
    """Where an environment of the running test waits, and what it did."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.began, self.goes_on, self.closed = threading.Event(), threading.Event(), threading.Event()

    def hold(self, what: str) -> None:
        self.log.append(f"{what} begins")
        self.began.set()
        self.goes_on.wait(200)
        self.log.append(f"{what} ends")

    def close(self) -> None:
        self.log.append("close")
        self.closed.set()


stages: list[Stage] = []


@pytest.fixture
def stage() -> Iterator[Stage]:
    stages[:] = [Stage()]
    yield stages[0]
    stages[0].goes_on.set()


class Held:
    """Waits in its constructor or in its step."""

    def __init__(self, *, where: str) -> None:
        self._where, self._stage = where, stages[0]
        if where == "make":
            self._stage.hold("make")

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._stage.hold("step")
        return "", 1.0, True, False, {}

    def close(self) -> None:
        self._stage.close()


class HeldAndClosedByACoroutine(Held):
    """Its ``close`` is a coroutine function."""

    async def close(self) -> None:  # type: ignore[override] # both kinds are allowed
        self._stage.close()


def play(kind: type[Held], where: str) -> asyncio.Task[Any]:
    policy = chatml_policy("1", sampling=Sampling(10))
    client = PolicyClient(policy.generate, chat=policy.chat, sampling=policy.sampling, max_length=99, vocabulary=1000)
    workflow = environment(
        tokenizer=policy.chat.tokenizer, make=f"{__name__}:{kind.__name__}", make_options={"where": where}
    )
    running: Any = workflow(client, Prompt("Go.", policy.chat.encode("Go."), None))
    return asyncio.get_running_loop().create_task(running)


async def begin(stage: Stage, kind: type[Held], where: str) -> asyncio.Task[Any]:
    task = play(kind, where)
    assert await asyncio.to_thread(stage.began.wait, 20)
    return task


@pytest.mark.parametrize("kind", [Held, HeldAndClosedByACoroutine])
def test_an_environment_that_is_made_too_late_is_closed(stage: Stage, kind: type[Held]) -> None:
    async def run() -> None:
        task = await begin(stage, kind, "make")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stage.log == ["make begins"]
        stage.goes_on.set()
        assert await asyncio.to_thread(stage.closed.wait, 200)

    asyncio.run(run())
    assert stage.log == ["make begins", "make ends", "close"]


def test_an_environment_that_is_made_as_its_episode_is_cancelled_is_closed(stage: Stage) -> None:
    async def run() -> None:
        task = await begin(stage, Held, "make")
        stage.goes_on.set()
        while "make ends" not in stage.log:  # the event loop stands still, so the task has no environment yet
            time.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(stage.closed.wait, 200)

    asyncio.run(run())
    assert stage.log.count("close") == 1


@pytest.mark.parametrize("kind", [Held, HeldAndClosedByACoroutine])
def test_an_environment_is_not_closed_while_it_makes_a_step(stage: Stage, kind: type[Held]) -> None:
    async def run() -> None:
        task = await begin(stage, kind, "step")
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
        stage.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert stage.log == ["step begins", "step ends", "close"]


def test_an_environment_is_closed_though_its_step_hangs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "METHOD_END_S", 0.05)

    async def run() -> None:
        task = await begin(stage, Held, "step")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stage.log == ["step begins", "close"]
        stage.goes_on.set()

    asyncio.run(run())
