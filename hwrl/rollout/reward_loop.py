"""The event loop of a reward worker's process: an async function scores many prompts at once.

Each call has its own time limit. A call over its limit is cancelled. If it does not end then, its scores are ``stuck``,
and the replica ends the process after the other calls. While there are jobs, the loop notes every second that it is
alive. If a call blocks the loop for longer than the limit, the replica ends the process. If a call stops the loop, or
cancels tasks of others, the process ends at once, and the replica lets others score its jobs.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hwrl.rollout.reward import RewardFunction, Scores, ToScore, where
from hwrl.rollout.reward_process import (
    JOB,
    LOOP_BROKEN,
    Notes,
    RewardSettings,
    answer_of,
    not_scored,
    receive_frame,
    send_frame,
)

_PULSE_S = 1.0
_CANCEL_S = 1.0
"""How long a cancelled call may take to end."""


def serve(connection: socket.socket, reward: RewardFunction, settings: RewardSettings, notes: Notes) -> None:
    """Score jobs from ``connection`` until it is closed; then, or if the loop ends before, end the process."""
    try:
        asyncio.run(_Loop(connection, reward, settings, notes).serve())
    finally:
        os._exit(LOOP_BROKEN)


class _Loop:
    def __init__(
        self, connection: socket.socket, reward: RewardFunction, settings: RewardSettings, notes: Notes
    ) -> None:
        self._connection, self._reward, self._settings, self._notes = connection, reward, settings, notes
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._jobs: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Score until the process ends, or a call cancels this task."""
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)
        while True:
            if self._jobs:
                self._notes.note_alive()
            await asyncio.sleep(min(_PULSE_S, self._settings.timeout_s / 4))

    def _read(self) -> None:
        try:
            job = asyncio.create_task(self._answer(receive_frame(self._connection)))
        except (EOFError, OSError):  # the replica has closed its workers
            os._exit(0)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _answer(self, frame: bytes) -> None:
        (number,) = JOB.unpack_from(frame)
        try:
            scores = await self._score(pickle.loads(frame[JOB.size :]), number)
        except asyncio.CancelledError:  # by foreign code: what a call raises itself is part of its scores
            os._exit(LOOP_BROKEN)
        except BaseException as exc:  # noqa: BLE001 - the answer's class is missing here; it is reported
            scores = not_scored(exc)
        send_frame(self._connection, answer_of(number, scores))

    async def _score(self, work: ToScore, number: int) -> Scores:
        calls = enumerate(self._reward.calls(work))
        results = await asyncio.gather(*(self._run(call, work, number=number, index=index) for index, call in calls))
        whole = Scores(errors=sum(one.errors for one in results), stuck=any(one.stuck for one in results))
        for one in results:
            if one.failure is not None:
                whole.failure = one.failure
                break
            whole.metrics += one.metrics
        return whole

    async def _run(self, call: Callable[[], Any], work: ToScore, *, number: int, index: int) -> Scores:
        """Return the scores of one call, after up to ``attempts`` attempts. A timeout is not repeated."""
        scores, timeout_s = Scores(), self._settings.timeout_s
        async with self._slots:
            for attempt in range(1, self._settings.attempts + 1):
                self._notes.note_call(number, index, attempt)
                task = asyncio.create_task(_outcome(call))
                done, _ = await asyncio.wait([task], timeout=timeout_s)
                if not done:
                    task.cancel()
                    done, _ = await asyncio.wait([task], timeout=_CANCEL_S)
                    text = where(work.texts, None if self._settings.batch else index)
                    late = f"the reward function did not return within {timeout_s:g} s {text}"
                    return Scores(errors=scores.errors + 1, failure=late, stuck=not done)
                if self._reward.take(task.result().result, scores, work, index=index):
                    break
        return scores


async def _outcome(call: Callable[[], Any]) -> Future[Any]:
    """Return the result of ``call``, or its error, in a future: asyncio would end the loop for a SystemExit."""
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(await call())
    except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
        outcome.set_exception(exc)
    return outcome
