"""Threads that score responses beside generation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from hwrl.errors import DataError
from hwrl.interfaces import Response
from hwrl.rollout.data import Prompt
from hwrl.rollout.reward import Reward, score_response


@dataclass
class Scores:
    """The reward function's metrics for each response to a prompt, in order.

    ``errors`` counts the calls without a result. ``failure`` is the reason if responses at the end have no metrics.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    errors: int = 0
    failure: str | None = None


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    responses: Sequence[Response]
    scores: Future[Scores]
    errors: int = 0
    text: str = ""
    called_s: float | None = None  # start of the running call; None: no call runs


class RewardWorkers:
    """Scores the responses to prompts in ``threads`` threads, so that generation never waits for a reward function.

    If a call raises, it is repeated, up to ``attempts`` calls in all; then the prompt has failed. If a call takes
    longer than ``timeout_s``, the prompt has failed at once. Such a thread cannot be stopped: :meth:`expire` abandons
    it and starts another. ``decode`` turns token ids into text for the function. The threads are daemons. They end with
    the process, or after :meth:`close`.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        decode: Callable[[Sequence[int]], str],
        attempts: int = 3,
        threads: int = 4,
        timeout_s: float = 300.0,
    ) -> None:
        self._reward, self._decode = reward, decode
        self._attempts, self._timeout_s = attempts, timeout_s
        self._threads = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._running: list[_Job] = []
        self._lock = threading.Lock()  # a job leaves _running once: by its result or by its timeout
        for _ in range(threads):
            self._start_thread()

    def score(self, prompt: Prompt, responses: Sequence[Response]) -> Future[Scores]:
        """Queue ``responses`` for scoring. The future never has an exception: a failure is part of the scores."""
        job = _Job(prompt, responses, Future())
        self._jobs.put(job)
        return job.scores

    def expire(self) -> None:
        """Fail the prompts whose present call has taken too long. Call this regularly; it does not block."""
        now_s = time.monotonic()
        with self._lock:
            late = [job for job in self._running if job.called_s is not None and now_s - job.called_s > self._timeout_s]
            self._running = [job for job in self._running if job not in late]
        for job in late:
            failure = f"the reward function did not return within {self._timeout_s:g} s for the response {job.text!r}"
            job.scores.set_result(Scores([], job.errors + 1, failure))
            self._start_thread()

    def close(self) -> None:
        """Drop waiting jobs and end the threads. A thread inside a call ends after it. Does not wait."""
        with contextlib.suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._running.append(job)
            try:
                scores = self._score(job)
            except BaseException as exc:  # noqa: BLE001 - the thread continues, and the failure is the prompt's answer
                scores = Scores(errors=job.errors + 1, failure=f"scoring raised {exc!r}")
            with self._lock:
                if job not in self._running:  # expired, and another thread replaces this one
                    return
                self._running.remove(job)
            job.scores.set_result(scores)

    def _score(self, job: _Job) -> Scores:
        scores = Scores()
        for response in job.responses:
            job.text = self._decode(response.token_ids.tolist())
            metrics = self._call(job)
            if isinstance(metrics, str):
                scores.failure = metrics
                break
            scores.metrics.append(metrics)
        scores.errors = job.errors
        return scores

    def _call(self, job: _Job) -> dict[str, float] | str:
        """Return the metrics of the response ``job.text``, or the reason of the last failed attempt."""
        failure = ""
        for _ in range(self._attempts):
            job.called_s = time.monotonic()
            try:
                return score_response(self._reward, prompt=job.prompt.text, response=job.text, answer=job.prompt.answer)
            except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
                job.errors += 1
                failure = f"the reward function raised {exc!r} for the response {job.text!r}"
            finally:
                job.called_s = None
        return failure


def unscored(scores: Sequence[Scores]) -> DataError:
    """Return the error of an evaluation with failed prompts."""
    failures = [one.failure for one in scores if one.failure is not None]
    return DataError(
        f"{len(failures)} of {len(scores)} evaluation prompts could not be scored",
        why=failures[0],
        fix="fix the reward function, or raise reward.timeout_s; reward_errors in the metrics counts such errors",
    )
