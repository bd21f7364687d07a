"""Processes that score responses beside generation: :class:`RewardWorkers`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Protocol

from hwrl.errors import DataError
from hwrl.interfaces import Response
from hwrl.rollout.data import Prompt
from hwrl.rollout.reward_process import CALL, receive_frame, send_frame

_log = logging.getLogger(__name__)
_BACKLOG_S = 0.1
"""A prompt that has waited this long gets another worker."""
_PIPE_S = 10.0
"""How long a live worker may take to move one frame; it moves at memory speed."""
_EXIT_S = 1.0
"""How long a process may take to end after it closed its socket."""
_TICK_S = 1.0
"""How often the notes of running calls are read at least, so that their pipe never fills up."""


@dataclass
class Scores:
    """The reward function's metrics for each response to a prompt, in order.

    ``errors`` counts the calls without a result. ``failure`` is the reason if responses at the end have no metrics.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    errors: int = 0
    failure: str | None = None


class Scorer(Protocol):
    """Scores responses beside generation, as :class:`RewardWorkers` does."""

    def score(self, prompt: Prompt, responses: Sequence[Response]) -> Future[Scores]:
        """Queue ``responses`` for scoring. Does not block. The future has no exception; it may be cancelled."""
        ...

    def close(self) -> None:
        """Drop unfinished work."""
        ...


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    responses: Sequence[Response]
    scores: Future[Scores] = field(default_factory=Future)
    queued_s: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)

    def answer(self, scores: Scores) -> None:
        """Set the result, unless nobody wants it any longer."""
        with contextlib.suppress(InvalidStateError):
            self.scores.set_result(scores)


class RewardWorkers:
    """Scores the responses to prompts in up to ``workers`` processes, which never slow generation down.

    The first process starts at once. Another one starts when a prompt has waited 0.1 s. Each process loads ``function``
    (as in :func:`~hwrl.rollout.reward.load_reward`, which explains ``source``) and calls it in its main thread.
    ``decode`` turns token ids into text, in a thread of this process.

    If a call raises, it is repeated, up to ``attempts`` calls in all; then the prompt has failed. If a call takes
    longer than ``timeout_s``, its process is killed with all that it started, and the prompt has failed at once. So it
    has if the process dies. A later prompt starts a new process. All processes end with :meth:`close`, and with this
    process.
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
    ) -> None:
        self._setup = pickle.dumps((function, source, attempts))
        self._decode, self._limit, self._timeout_s = decode, workers, timeout_s
        self._jobs: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._loaded: Future[None] = Future()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        # One thread starts all processes: the kernel ends them with the thread that started them.
        self._thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self._thread.start()

    def score(self, prompt: Prompt, responses: Sequence[Response]) -> Future[Scores]:
        """Queue ``responses`` for scoring. Does not block.

        The future never has an exception: a failure is part of the scores. The caller and :meth:`close` may cancel it.
        """
        job = _Job(prompt, responses)
        if self._closed:
            job.scores.cancel()
        else:
            self._jobs.append(job)
            self._ring()
        return job.scores

    def wait_until_ready(self) -> None:
        """Wait until the first process has loaded the function. Raises DataError if it cannot."""
        self._loaded.result()

    def close(self) -> None:
        """Drop all jobs and end the processes, also inside of a call."""
        self._closed = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it rings already, or nobody is there to hear it
            self._bell_end.send(b"!")

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._selector, self._bell, self._bell_end:
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._start_worker()
            try:
                while not self._closed:
                    self._give_jobs()
                    for key, _ in self._selector.select(self._wait_s()):
                        if key.data is None:
                            self._bell.recv(1 << 12)
                        else:
                            self._receive(key.data)
                    self._end_late()
            finally:
                self._closed = True
                self._cancel_all()

    def _cancel_all(self) -> None:
        self._loaded.cancel()
        for worker in self._workers:
            worker.end()
            if worker.job is not None:
                worker.job.scores.cancel()
        while self._jobs:
            self._jobs.popleft().scores.cancel()

    def _give_jobs(self) -> None:
        """Give waiting jobs to idle workers; start another worker if a job must wait too long."""
        for worker in [worker for worker in self._workers if worker.is_idle]:
            if (next_job := self._next_job()) is None:
                return
            job, message = next_job
            try:
                worker.give(job, message)
            except OSError:  # it died while it was idle
                self._remove(worker)
                self._jobs.appendleft(job)
        if self._jobs and self._backlog_s() <= 0:
            self._start_worker()

    def _backlog_s(self) -> float:
        """Return the seconds until another worker starts, if jobs wait until then."""
        if not self._workers:
            return 0.0
        if len(self._workers) >= self._limit or any(worker.is_loading for worker in self._workers):
            return math.inf
        return self._jobs[0].queued_s + _BACKLOG_S - time.monotonic()

    def _next_job(self) -> tuple[_Job, bytes] | None:
        """Return the oldest job that is wanted and can be sent, with its message; None if there is none."""
        while self._jobs:
            job = self._jobs.popleft()
            if job.scores.cancelled():
                continue
            try:
                job.texts = [self._decode(response.token_ids.tolist()) for response in job.responses]
                return job, pickle.dumps((job.prompt.text, job.prompt.answer, job.texts))
            except Exception as exc:  # noqa: BLE001 - from a tokenizer or an answer's class; it is reported
                job.answer(Scores(errors=1, failure=f"the responses cannot be sent to a reward worker: {exc!r}"))
        return None

    def _start_worker(self) -> None:
        try:
            worker = _Worker(self._setup)
        except OSError as exc:
            self._note_failed_start(
                DataError("no reward worker can start", why=str(exc), fix="free memory or processes")
            )
            return
        self._workers.append(worker)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _note_failed_start(self, error: DataError) -> None:
        """Go on with the other workers. If there is none, the oldest job has failed."""
        if self._workers:
            self._limit = len(self._workers)
            _log.warning("no more than %d reward workers run: %s: %s", self._limit, error.what, error.why)
            return
        if not self._loaded.done():
            self._loaded.set_exception(error)
        if self._jobs:
            self._jobs.popleft().answer(Scores(errors=1, failure=f"{error.what}: {error.why}"))

    def _receive(self, worker: _Worker) -> None:
        try:
            answer = json.loads(receive_frame(worker.connection))
        except (EOFError, OSError, ValueError):
            self._bury(worker)
            return
        if not worker.is_loading:
            worker.finish(Scores(*answer))
            return
        worker.is_loading = False
        if answer is not None:
            self._remove(worker)
            self._note_failed_start(DataError(answer[0], why=answer[1], fix=answer[2]))
        elif not self._loaded.done():
            self._loaded.set_result(None)

    def _end_late(self) -> None:
        """End the workers with a call that takes too long."""
        now_s = time.monotonic()
        for worker in [worker for worker in self._workers if worker.job is not None]:
            if now_s - worker.called_s >= min(_TICK_S, self._timeout_s):
                worker.read_calls()
            if now_s - worker.called_s >= self._timeout_s:
                self._remove(worker)
                worker.fail(f"the reward function did not return within {self._timeout_s:g} s")

    def _bury(self, worker: _Worker) -> None:
        """Report a dead worker."""
        how = self._remove(worker, grace_s=_EXIT_S)
        if worker.is_loading:
            what = "a reward worker ended while it loaded the function"
            self._note_failed_start(DataError(what, why=f"its process {how}", fix="look at what the module does"))
        elif worker.job is not None:
            worker.fail(f"its worker {how} in the reward function")

    def _remove(self, worker: _Worker, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        return worker.end(grace_s=grace_s)

    def _wait_s(self) -> float | None:
        """Return how long to wait for news at most; None without limit."""
        ends_s = [worker.called_s + self._timeout_s for worker in self._workers if worker.job is not None]
        wait_s = min([_TICK_S, *(end_s - time.monotonic() for end_s in ends_s)]) if ends_s else math.inf
        wait_s = min(wait_s, self._backlog_s() if self._jobs else math.inf)
        return None if wait_s == math.inf else max(0.0, wait_s)


class _Worker:
    """One worker process, with at most one job. ``setup`` is its first frame. Raises OSError if it cannot start."""

    def __init__(self, setup: bytes) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(_PIPE_S)
        self._calls_pipe, calls_end = os.pipe()
        os.set_blocking(self._calls_pipe, False)
        descriptors = (theirs.fileno(), calls_end)
        code = (
            f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
            f"from hwrl.rollout.reward_process import main; main({theirs.fileno()}, {calls_end}, {os.getpid()})"
        )
        try:
            # Not multiprocessing: it would import the main module, which is Ray's in a replica.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=descriptors, process_group=0
            )
        except OSError:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(calls_end)
        self.is_loading = True
        self.job: _Job | None = None
        self._calls: tuple[int, float, int] = (0, 0.0, 0)  # begun in this job; time and response of the last one
        with contextlib.suppress(OSError):  # it is dead: reading tells
            send_frame(self.connection, setup)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a job."""
        return not self.is_loading and self.job is None

    def give(self, job: _Job, message: bytes) -> None:
        """Send ``job`` to the process. Raises OSError if the process is dead."""
        self.job, self._calls = job, (0, time.monotonic(), 0)
        send_frame(self.connection, message)

    @property
    def called_s(self) -> float:
        """The begin of the present call as far as it is known, in seconds of ``time.monotonic``."""
        return self._calls[1]

    def read_calls(self) -> None:
        """Read the notes of the calls that began since the last reading."""
        nbytes = CALL.size << 10
        with contextlib.suppress(BlockingIOError):
            while notes := os.read(self._calls_pipe, nbytes):
                self._calls = (self._calls[0] + len(notes) // CALL.size, *CALL.unpack(notes[-CALL.size :]))
                if len(notes) < nbytes:
                    break

    def finish(self, scores: Scores) -> None:
        """Answer the job. The process is idle then."""
        self.read_calls()
        job, self.job = self.job, None
        assert job is not None, "only a worker with a job answers"
        job.answer(scores)

    def fail(self, why: str) -> None:
        """Answer the job of an ended process."""
        assert self.job is not None, "ask for the job first"
        count, _, index = self._calls
        texts = self.job.texts
        errors = max(count - index, 1)  # index calls have a result
        self.job.answer(Scores([], errors, f"{why} for the response {texts[index]!r}"))

    def end(self, *, grace_s: float = 0.0) -> str:
        """Kill what the process started, and the process itself if it lives after ``grace_s``; return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PIPE_S)
        self.read_calls()
        self._close()
        return _describe(self._process.returncode)

    def _close(self) -> None:
        self.connection.close()
        os.close(self._calls_pipe)


def _describe(status: int | None) -> str:
    """Say how a process ended."""
    if status is None:
        return "hung"
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
