"""The threads that score responses: whatever the reward function does, each prompt gets its answer."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.interfaces import Response
from hwrl.rollout import RewardWorkers
from tests.support.scripted_rollout import Desk, Lengths, rollouter_of, step_until


def test_a_reward_that_hangs_fails_its_prompt_and_holds_up_no_other() -> None:
    released = threading.Event()

    def hangs(prompt: str, response: str, answer: object) -> float:
        if prompt == "0":
            released.wait(30)
        return 1.0

    desk = Desk([0, 1])
    rollouter = rollouter_of(desk, reward=hangs, reward_timeout_s=0.2)
    step_until(rollouter, lambda: bool(desk.failed and desk.groups))
    assert [group.sequence_number for group in desk.groups] == [1], "another thread took the hung one's place"
    assert desk.failed[0][0] == 0 and "did not return within 0.2 s for the response '1'" in desk.failed[0][1]
    released.set()
    desk.numbers = [2]
    step_until(rollouter, lambda: len(desk.groups) == 2)
    assert len(desk.failed) == 1, "a late answer counts no more"
    assert rollouter.stats()["reward_errors"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_whatever_a_reward_raises_its_thread_goes_on(error: BaseException) -> None:
    def raises(prompt: str, response: str, answer: object) -> float:
        if prompt == "0":
            raise error
        return 1.0

    desk = Desk([0, 1])
    rollouter = rollouter_of(desk, reward=raises)
    step_until(rollouter, lambda: bool(desk.failed and desk.groups))
    assert type(error).__name__ in desk.failed[0][1]


def test_a_response_that_cannot_be_decoded_fails_its_prompt_and_closing_waits_for_nobody() -> None:
    token = np.zeros(1, dtype=np.int32)
    response = Response(token, token.astype(np.float32), token, truncated=False)
    workers = RewardWorkers(lambda *_: 1.0, decode=lambda ids: str(ids[7]), threads=1)
    failures = [workers.score(Lengths()[0], [response]).result(timeout=10).failure for _ in range(2)]
    assert all("IndexError" in str(failure) for failure in failures)
    workers.close()


def test_an_evaluation_whose_reward_hangs_once_tries_that_prompt_again() -> None:
    calls, released = [0], threading.Event()

    def hangs_once(prompt: str, response: str, answer: object) -> float:
        calls[0] += 1
        if calls[0] == 1:
            released.wait(30)
        return 0.5

    rollouter = rollouter_of(Desk([]), reward=hangs_once, reward_timeout_s=0.2)
    answer = rollouter.evaluate([Lengths()[0]])
    step_until(rollouter, answer.done)
    released.set()
    assert answer.result(timeout=0).metrics == {"reward": 0.5}
    assert rollouter.stats()["reward_errors"] == 1


def test_an_evaluation_whose_reward_hangs_says_so() -> None:
    released = threading.Event()
    rollouter = rollouter_of(Desk([]), reward=lambda *_: float(released.wait(30)), reward_timeout_s=0.2)
    answer = rollouter.evaluate([Lengths()[0]])
    step_until(rollouter, answer.done)
    released.set()
    with pytest.raises(DataError, match=r"1 of 1 evaluation prompts(.|\n)*did not return within 0.2 s"):
        answer.result(timeout=0)
