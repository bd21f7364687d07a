"""Score responses in other processes while generation goes on: :class:`RewardWorkers`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from hwrl.errors import DataError, short_repr
from hwrl.interfaces import Ints
from hwrl.rollout.data import Prompt
from hwrl.rollout.reward import Scores, ToScore
from hwrl.rollout.reward_handle import RewardProcess, ScoringJob
from hwrl.rollout.reward_process import LOADED, RewardSettings, receive_frame

_log = logging.getLogger(__name__)
_BACKLOG_S = 0.1
"""Another worker starts when a prompt has waited this long."""
_EXIT_S = 1.0
"""How long a process may take to end after it closed its socket."""
_TICK_S = 1.0
"""Busy processes are looked at this often: a forked child may hide the end of one."""


class Scorer(Protocol):
    """Scores responses while generation goes on, as :class:`RewardWorkers` does.

    It must limit the time of its calls itself, so that each future ends with a result or is cancelled: a replica that
    waits for scores counts as healthy.
    """

    def score(self, prompt: Prompt, responses: Sequence[Ints]) -> Future[Scores]:
        """Queue ``responses`` (token ids) for scoring. Does not block.

        The future never has an exception; a failure is part of the scores. It may be cancelled.
        """
        ...

    def close(self) -> None:
        """Drop unfinished work."""
        ...


class RewardWorkers:
    """Scores the responses to prompts in up to ``workers`` processes, so that user code cannot block generation.

    The first process starts at once. Another one starts when a prompt has waited 0.1 s. Each process loads ``function``
    as :func:`~hwrl.rollout.reward.load_reward` does; ``source`` is an argument of that. It calls the function in its
    main thread, as :class:`~hwrl.rollout.reward.RewardFunction` says. An async function has up to ``concurrency`` calls
    at once in each process. ``decode`` turns token ids into text, in a thread of this process. All processes end with
    :meth:`close`, and with this process.

    * A call that raises is repeated. After ``attempts`` calls the prompt has failed.
    * A call that takes longer than ``timeout_s`` is not repeated: the prompt has failed. An async call is cancelled
      first. If it does not end, or is not async, its process is killed with all that it started.
    * If the process dies, or sends an answer that is not due, its prompts are scored again, each alone in another
      process. A prompt whose process dies then has failed. An async function that stops its event loop, or cancels
      tasks of other calls, loses its process, too.
    * A call in the main thread begins in the working directory of the replica. A process in which a call closed
      standard input, output or error scores no other prompt.
    * A process must load the function within the longer one of ``load_timeout_s`` and ``timeout_s``. Else its start has
      failed, and no other process starts for ``retry_s``, unless none is left.
    * A process that does not read or send a whole frame within ``frame_timeout_s`` is lost: frames move at memory
      speed.
    """

    def __init__(
        self,
        function: str,
        *,
        decode: Callable[[Sequence[int]], str],
        source: bytes | None = None,
        attempts: int = 3,
        workers: int = 4,
        timeout_s: float = 300.0,
        batch: bool = False,
        concurrency: int = 64,
        load_timeout_s: float = 60.0,
        frame_timeout_s: float = 10.0,
        retry_s: float = 30.0,
    ) -> None:
        self._settings = RewardSettings(function, source, attempts, batch, concurrency, timeout_s)
        self._decode, self._limit, self._timeout_s = decode, workers, timeout_s
        self._jobs: deque[ScoringJob] = deque()
        self._workers: list[RewardProcess] = []
        self._numbers = itertools.count(LOADED + 1)
        self._load_limit_s = max(timeout_s, load_timeout_s)
        self._frame_timeout_s, self._retry_s = frame_timeout_s, retry_s
        self._next_start_s = -math.inf  # in seconds of time.monotonic: no additional worker starts before
        self._loaded: Future[None] = Future()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_up_socket, self._waking_end = socket.socketpair()
        self._waking_end.setblocking(False)
        # This thread starts all processes, because the kernel ends a process with the thread that started it.
        self._thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self._thread.start()

    def score(self, prompt: Prompt, responses: Sequence[Ints]) -> Future[Scores]:
        """Queue ``responses`` (token ids) for scoring. Does not block.

        The future never has an exception; a failure is part of the scores. The caller and :meth:`close` may cancel it.
        """
        job = ScoringJob(prompt, responses, next(self._numbers))
        self._jobs.append(job)
        if self._closed:  # after the append: a thread that ended before it did not cancel the job
            job.scores.cancel()
        self._wake()
        return job.scores

    def wait_until_ready(self) -> None:
        """Wait until a process has loaded the function. Raises DataError if the first one cannot."""
        self._loaded.result()

    def close(self) -> None:
        """Cancel all jobs and kill the processes, also during a call. Blocks until they have ended."""
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the socket is full, so the thread wakes anyway; or the thread has ended
            self._waking_end.send(b"!")

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._selector, self._wake_up_socket, self._waking_end:
            try:
                self._selector.register(self._wake_up_socket, selectors.EVENT_READ)
                self._start_worker()
                while not self._closed:
                    self._send_jobs()
                    for key, _ in self._selector.select(self._wait_s()):
                        if key.data is None:
                            self._wake_up_socket.recv(1 << 12)
                        else:
                            self._receive(key.data)
                    self._end_late()
            except Exception as exc:  # noqa: BLE001 - logged; the futures must not wait for ever
                _log.exception("no more responses are scored")
                if not self._loaded.done():
                    self._loaded.set_exception(exc)
            finally:
                self._closed = True
                self._cancel_all()

    def _cancel_all(self) -> None:
        self._loaded.cancel()
        for worker in self._workers:
            worker.end()
            for job in worker.jobs.values():
                job.scores.cancel()
        while self._jobs:
            self._jobs.popleft().scores.cancel()

    def _send_jobs(self) -> None:
        """Send waiting jobs to workers with room; start another worker if the oldest job has waited too long."""
        while self._jobs:
            job = self._jobs[0]
            worker = next((worker for worker in self._workers if worker.has_room_for(job)), None)
            if job.scores.cancelled():
                self._jobs.popleft()
            elif worker is not None:
                self._send(self._jobs.popleft(), worker)
            else:
                break
        if self._jobs and self._backlog_s() <= 0:
            self._start_worker()

    def _send(self, job: ScoringJob, worker: RewardProcess) -> None:
        try:
            if not job.message:
                job.texts = [self._decode(response.tolist()) for response in job.responses]
                columns = worker.columns.of({"source": job.prompt.source, **job.prompt.row})
                job.message = pickle.dumps(ToScore(job.prompt.text, job.prompt.answer, job.texts, columns))
        except Exception as exc:  # noqa: BLE001 - from a tokenizer or an answer's class; it is reported
            failure = f"the responses cannot be sent to a reward worker: {short_repr(exc)}"
            job.answer(Scores(errors=1, failure=failure))
            return
        try:
            worker.send(job)
        except OSError:  # it has died while it was idle, or does not read
            self._lose(worker)

    def _backlog_s(self) -> float:
        """Return how long the oldest job must wait from now until another worker starts; inf: for an event."""
        if not self._workers:
            return 0.0
        if len(self._workers) >= self._limit or any(worker.is_loading for worker in self._workers):
            return math.inf
        return max(self._jobs[0].queued_s + _BACKLOG_S, self._next_start_s) - time.monotonic()

    def _start_worker(self) -> None:
        try:
            worker = RewardProcess(self._settings, frame_timeout_s=self._frame_timeout_s)
        except OSError as exc:
            fix = "free memory or processes"
            self._note_failed_start(DataError("no reward worker can start", why=str(exc), fix=fix))
            return
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _note_failed_start(self, error: DataError) -> None:
        """Start no additional worker for ``retry_s``. If there is no other worker, fail the oldest job."""
        if self._workers:
            self._next_start_s = time.monotonic() + self._retry_s
            _log.warning("%d reward workers go on: %s: %s", len(self._workers), error.what, error.why)
            return
        if not self._loaded.done():
            self._loaded.set_exception(error)
        if self._jobs:
            self._jobs.popleft().answer(Scores(errors=1, failure=f"{error.what}: {error.why}"))

    def _receive(self, worker: RewardProcess) -> None:
        try:
            frame = receive_frame(worker.connection)
        except (EOFError, OSError):
            self._lose(worker, grace_s=_EXIT_S)
            return
        try:
            error = worker.take_answer(frame)
        except (ValueError, TypeError, KeyError, RecursionError):
            self._lose(worker, "sent an answer to no question (does it fork, and return twice?)")
            return
        if error is not None or worker.must_end:
            self._remove(worker)
        if error is not None:
            self._note_failed_start(error)
        elif not self._loaded.done():
            self._loaded.set_result(None)

    def _end_late(self) -> None:
        """End the workers with a call over its time limit, and those that do not load the function in time.

        Remove those whose process has ended without an end of its socket, because a forked child holds it.
        """
        now_s = time.monotonic()
        for worker in list(self._workers):
            if worker.has_ended:
                self._lose(worker)
            elif not worker.is_idle and now_s - worker.called_s >= self._limit_s(worker):
                self._lose(worker, f"was not ready within {self._load_limit_s:g} s", late=True)

    def _limit_s(self, worker: RewardProcess) -> float:
        return self._load_limit_s if worker.is_loading else self._timeout_s

    def _lose(self, worker: RewardProcess, how: str = "", *, late: bool = False, grace_s: float = 0.0) -> None:
        """End ``worker``, and queue its jobs again, each to run alone in its process; or fail its only job.

        A ``late`` call fails its job at once, and the death of a process at the second time. ``how`` continues the
        words "its process"; the default is how it ended. A process that has not loaded the function is a failed start.
        """
        ended, jobs = self._remove(worker, grace_s=grace_s), list(worker.jobs.values())
        why = f"its worker {how or ended} in the reward function"
        if late:
            why = f"the reward function did not return within {self._timeout_s:g} s"
        if worker.is_loading:
            what, fix = "a reward worker ended while it loaded the function", "look at what the module does"
            self._note_failed_start(DataError(what, why=f"its process {how or ended}", fix=fix))
        elif not jobs:
            _log.warning("an idle reward worker was lost: %s", why)
        elif len(jobs) == 1 and (jobs[0].alone or late):
            worker.fail(why)
        else:
            for job in jobs:
                job.alone, job.errors = True, job.errors + (len(jobs) == 1)
            self._jobs.extendleft(reversed(jobs))

    def _remove(self, worker: RewardProcess, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        return worker.end(grace_s=grace_s)

    def _wait_s(self) -> float | None:
        """Return how long to wait for an event at most; None without limit."""
        busy = [worker for worker in self._workers if not worker.is_idle]
        waits_s = [worker.called_s + self._limit_s(worker) - time.monotonic() for worker in busy]
        wait_s = min([*waits_s, _TICK_S if busy else math.inf, self._backlog_s() if self._jobs else math.inf])
        return None if wait_s == math.inf else max(0.0, wait_s)
