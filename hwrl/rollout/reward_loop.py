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
from typing import Any

from hwrl.rollout.reward import RewardFunction, Scores, ToScore, UnjudgedError, describe_error
from hwrl.rollout.reward_process import (
    JOB,
    LENGTH,
    LOADED,
    LOOP_BROKEN,
    RewardSettings,
    answer_of,
    frame_of,
    not_scored,
)

_PULSE_S = 1.0
_CANCEL_S = 1.0
"""How long a cancelled call may take to end."""

NoteCall = Callable[[int, int], None]
"""Notes that a call begins; its arguments are the job's number and the call's index."""


def serve(connection: socket.socket, reward: RewardFunction, settings: RewardSettings, note: NoteCall) -> None:
    """Score jobs from ``connection`` until it is closed; then, or if the loop ends before, end the process."""
    try:
        asyncio.run(_Loop(reward, settings, note).serve(connection))
    finally:
        os._exit(LOOP_BROKEN)


class _Loop:
    def __init__(self, reward: RewardFunction, settings: RewardSettings, note: NoteCall) -> None:
        self._reward, self._settings, self._note = reward, settings, note
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._jobs: set[asyncio.Task[None]] = set()

    async def serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        pulse = asyncio.create_task(self._pulse())
        pulse.add_done_callback(lambda _: os._exit(LOOP_BROKEN))
        try:
            while True:
                (nbytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                frame = await reader.readexactly(nbytes)
                job = asyncio.create_task(self._answer(frame, writer))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)
        except asyncio.IncompleteReadError:  # the replica has closed its workers
            pulse.cancel()

    async def _pulse(self) -> None:
        while True:
            if self._jobs:
                self._note(LOADED, 0)
            await asyncio.sleep(min(_PULSE_S, self._settings.timeout_s / 4))

    async def _answer(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        (number,) = JOB.unpack_from(frame)
        try:
            scores = await self._score(pickle.loads(frame[JOB.size :]), number)
        except asyncio.CancelledError:  # by foreign code: what a call raises itself is part of its scores
            os._exit(LOOP_BROKEN)
        except BaseException as exc:  # noqa: BLE001 - the answer's class is missing here; it is reported
            scores = not_scored(exc)
        writer.write(frame_of(answer_of(number, scores)))

    async def _score(self, work: ToScore, number: int) -> Scores:
        calls = self._reward.calls(work)
        results = await asyncio.gather(
            *(self._run(call, work, number=number, index=index) for index, call in enumerate(calls))
        )
        whole = Scores(errors=sum(one.errors for one in results), stuck=any(one.stuck for one in results))
        for one in results:
            if one.failure is not None:
                whole.failure = one.failure
                break
            whole.metrics += one.metrics
        return whole

    async def _run(self, call: Callable[[], Any], work: ToScore, *, number: int, index: int) -> Scores:
        """Return the scores of one call, after up to ``attempts`` attempts. A timeout is not repeated."""
        where, scores = self._reward.where(index, work), Scores()
        async with self._slots:
            for _ in range(self._settings.attempts):
                self._note(number, index)
                outcome = asyncio.create_task(_outcome(call))
                done, _ = await asyncio.wait([outcome], timeout=self._settings.timeout_s)
                if not done:
                    outcome.cancel()
                    done, _ = await asyncio.wait([outcome], timeout=_CANCEL_S)
                    limit = f"did not return within {self._settings.timeout_s:g} s"
                    return Scores(
                        errors=scores.errors + 1, failure=f"the reward function {limit} {where}", stuck=not done
                    )
                try:
                    result, error = outcome.result()
                    if error is not None:
                        raise error
                    scores.metrics = self._reward.metrics_of(result, work)
                    return scores
                except UnjudgedError as exc:
                    scores.failure = f"{exc} {where}"
                    return scores
                except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
                    scores.errors += 1
                    failure = describe_error(exc, where)
        scores.failure = failure
        return scores


async def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of ``call``, or its error as a value: asyncio would end the loop for a SystemExit."""
    try:
        return await call(), None
    except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
        return None, exc
