"""Processes that score responses beside generation: :class:`RewardWorkers`."""

from __future__ import annotations

import contextlib
import itertools
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
from hwrl.interfaces import Ints
from hwrl.rollout.data import Prompt
from hwrl.rollout.reward import short_repr
from hwrl.rollout.reward_process import CALL, JOB, LOADED, receive_frame, send_frame

_log = logging.getLogger(__name__)
_BACKLOG_S = 0.1
"""A prompt that has waited this long gets another worker."""
_PIPE_S = 10.0
"""How long a live worker may take to move one frame; it moves at memory speed."""
_EXIT_S = 1.0
"""How long a process may take to end after it closed its socket."""
_TICK_S = 1.0
"""How often the notes of running calls are read at least, so that their pipe never fills up."""
_LOAD_S = 60.0
"""How long a process may take to load the function, unless a call may take longer."""
_RETRY_S = 30.0
"""After a failed start the other workers go on alone for so long."""
_SENDS = 2
"""Attempts to send one job: a worker may die while it is idle, but hardly a second one."""


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

    def score(self, prompt: Prompt, responses: Sequence[Ints]) -> Future[Scores]:
        """Queue ``responses`` (token ids) for scoring. Does not block.

        The future has no exception; it may be cancelled.
        """
        ...

    def close(self) -> None:
        """Drop unfinished work."""
        ...


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    responses: Sequence[Ints]
    number: int
    scores: Future[Scores] = field(default_factory=Future)
    queued_s: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)
    failed_sends: int = 0

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
    longer than ``timeout_s``, its process is killed with all that it started, and the prompt has failed at once. The
    prompt also fails if the process dies, or sends an answer to another prompt. A later prompt starts a new process.
    A process must load the function within ``timeout_s`` too, or within 60 s if that is longer; else its start has
    failed. All processes end with :meth:`close`, and with this process.
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
        self._numbers = itertools.count(LOADED + 1)
        self._load_limit_s = max(timeout_s, _LOAD_S)
        self._retry_s = -math.inf  # of time.monotonic; no further worker starts before
        self._loaded: Future[None] = Future()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_up_socket, self._waking_end = socket.socketpair()
        self._waking_end.setblocking(False)
        # One thread starts all processes: the kernel ends them with the thread that started them.
        self._thread = threading.Thread(target=self._run, name="reward", daemon=True)
        self._thread.start()

    def score(self, prompt: Prompt, responses: Sequence[Ints]) -> Future[Scores]:
        """Queue ``responses`` (token ids) for scoring. Does not block.

        The future never has an exception: a failure is part of the scores. The caller and :meth:`close` may cancel it.
        """
        job = _Job(prompt, responses, next(self._numbers))
        if self._closed:
            job.scores.cancel()
        else:
            self._jobs.append(job)
            self._wake()
        return job.scores

    def wait_until_ready(self) -> None:
        """Wait until a process has loaded the function. Raises DataError if the first one cannot."""
        self._loaded.result()

    def close(self) -> None:
        """Drop all jobs and end the processes, also inside of a call."""
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has enough to read already, or it has ended
            self._waking_end.send(b"!")

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._selector, self._wake_up_socket, self._waking_end:
            try:
                self._selector.register(self._wake_up_socket, selectors.EVENT_READ)
                self._start_worker()
                while not self._closed:
                    self._give_jobs()
                    for key, _ in self._selector.select(self._wait_s()):
                        if key.data is None:
                            self._wake_up_socket.recv(1 << 12)
                        else:
                            self._receive(key.data)
                    self._end_late()
            except Exception as exc:  # noqa: BLE001 - nobody may wait for this thread any longer
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
            except OSError as exc:  # it died while it was idle
                self._remove(worker)
                job.failed_sends += 1
                if job.failed_sends < _SENDS:
                    self._jobs.appendleft(job)
                else:
                    job.answer(_not_sent(exc))
        if self._jobs and self._backlog_s() <= 0:
            self._start_worker()

    def _backlog_s(self) -> float:
        """Return the seconds until another worker starts, if jobs wait until then."""
        if not self._workers:
            return 0.0
        if len(self._workers) >= self._limit or any(worker.is_loading for worker in self._workers):
            return math.inf
        return max(self._jobs[0].queued_s + _BACKLOG_S, self._retry_s) - time.monotonic()

    def _next_job(self) -> tuple[_Job, bytes] | None:
        """Return the oldest job that is wanted and can be sent, with its message; None if there is none."""
        while self._jobs:
            job = self._jobs.popleft()
            if job.scores.cancelled():
                continue
            try:
                job.texts = [self._decode(response.tolist()) for response in job.responses]
                return job, pickle.dumps((job.prompt.text, job.prompt.answer, job.texts))
            except Exception as exc:  # noqa: BLE001 - from a tokenizer or an answer's class; it is reported
                job.answer(_not_sent(exc))
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
        """Go on with the other workers for a while. If there is none, the oldest job has failed."""
        if self._workers:
            self._retry_s = time.monotonic() + _RETRY_S
            _log.warning("%d reward workers go on: %s: %s", len(self._workers), error.what, error.why)
            return
        if not self._loaded.done():
            self._loaded.set_exception(error)
        if self._jobs:
            self._jobs.popleft().answer(Scores(errors=1, failure=f"{error.what}: {error.why}"))

    def _receive(self, worker: _Worker) -> None:
        try:
            frame = receive_frame(worker.connection)
        except (EOFError, OSError):
            self._report_death(worker, self._remove(worker, grace_s=_EXIT_S))
            return
        try:
            error = worker.take(frame)
        except (ValueError, TypeError, RecursionError):
            self._remove(worker)
            self._report_death(worker, "sent an answer to no question (does it fork, and return twice?)")
            return
        if error is not None:
            self._remove(worker)
            self._note_failed_start(error)
        elif not self._loaded.done():
            self._loaded.set_result(None)

    def _end_late(self) -> None:
        """End the workers with a call that takes too long, or that take too long to load the function."""
        now_s = time.monotonic()
        for worker in [worker for worker in self._workers if not worker.is_idle]:
            if now_s - worker.called_s >= min(_TICK_S, self._timeout_s):
                worker.read_calls()
            if now_s - worker.called_s < self._limit_s(worker):
                continue
            self._remove(worker)
            if worker.is_loading:
                self._report_death(worker, f"was not ready within {self._load_limit_s:g} s")
            else:
                worker.fail(f"the reward function did not return within {self._timeout_s:g} s")

    def _limit_s(self, worker: _Worker) -> float:
        return self._load_limit_s if worker.is_loading else self._timeout_s

    def _report_death(self, worker: _Worker, how: str) -> None:
        """Report a worker that was removed. ``how`` continues "its process"."""
        if worker.is_loading:
            what, fix = "a reward worker ended while it loaded the function", "look at what the module does"
            self._note_failed_start(DataError(what, why=f"its process {how}", fix=fix))
        elif worker.job is not None:
            worker.fail(f"its worker {how} in the reward function")
        else:
            _log.warning("an idle reward worker was lost: its process %s", how)

    def _remove(self, worker: _Worker, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        return worker.end(grace_s=grace_s)

    def _wait_s(self) -> float | None:
        """Return how long to wait for news at most; None without limit."""
        ends_s = [worker.called_s + self._limit_s(worker) for worker in self._workers if not worker.is_idle]
        wait_s = min([_TICK_S, *(end_s - time.monotonic() for end_s in ends_s)]) if ends_s else math.inf
        wait_s = min(wait_s, self._backlog_s() if self._jobs else math.inf)
        return None if wait_s == math.inf else max(0.0, wait_s)


class _Worker:
    """One worker process, with at most one job. ``setup`` is its first frame. Raises OSError if it cannot start."""

    def __init__(self, setup: bytes) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self.connection, their_connection = socket.socketpair()
            ours.callback(self.connection.close)
            theirs.callback(their_connection.close)
            self._calls_pipe, calls_end = os.pipe()
            ours.callback(os.close, self._calls_pipe)
            theirs.callback(os.close, calls_end)
            self._process = _start_process(their_connection.fileno(), calls_end)
            self._close = ours.pop_all().close
        self.connection.settimeout(_PIPE_S)
        os.set_blocking(self._calls_pipe, False)
        self.is_loading = True
        self.job: _Job | None = None
        # The calls begun in this job, and the begin and the response of the last one. Loading counts as a call.
        self._calls: tuple[int, float, int] = (0, time.monotonic(), 0)
        try:
            send_frame(self.connection, setup)
        except TimeoutError:  # half a frame is sent: the process would wait for the rest
            self.end()
            raise
        except OSError:  # it is dead: reading tells
            pass

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a job."""
        return not self.is_loading and self.job is None

    def give(self, job: _Job, message: bytes) -> None:
        """Send ``job`` to the process. Raises OSError if the process is dead."""
        self.job, self._calls = job, (0, time.monotonic(), 0)
        send_frame(self.connection, JOB.pack(job.number) + message)

    @property
    def called_s(self) -> float:
        """The begin of the present call as far as it is known, in seconds of ``time.monotonic``."""
        return self._calls[1]

    def read_calls(self) -> None:
        """Read the notes of the calls that began since the last reading."""
        nbytes = CALL.size << 10
        with contextlib.suppress(BlockingIOError):
            while notes := os.read(self._calls_pipe, nbytes):
                for begun_s, number, index in CALL.iter_unpack(notes):
                    if number == self._number:  # else a process that the function forked works on an earlier job
                        self._calls = (self._calls[0] + 1, begun_s, index)
                if len(notes) < nbytes:
                    break

    @property
    def _number(self) -> int | None:
        """The number of the answer that the process owes; None if it owes none."""
        return LOADED if self.is_loading else None if self.job is None else self.job.number

    def take(self, frame: bytes) -> DataError | None:
        """Take the answer in ``frame``. The process is idle then. Returns why the function is not loaded, if so.

        Raises ValueError or TypeError if ``frame`` is not the answer that the process owes.
        """
        number, result = json.loads(frame)
        if number != self._number or number is None:
            raise ValueError(f"this is answer {number}, not {self._number}")
        if self.job is None:
            error = None if result is None else _load_error(*result)
            self.is_loading = False
            return error
        scores = _whole_scores(*result, count=len(self.job.texts))
        self.read_calls()
        job, self.job = self.job, None
        job.answer(scores)
        return None

    def fail(self, why: str) -> None:
        """Answer the job of an ended process."""
        assert self.job is not None, "ask for the job first"
        count, _, index = self._calls
        texts = self.job.texts
        errors = max(count - index, 1)  # index calls have a result
        where = f" for the response {short_repr(texts[index])}" if texts else ""
        self.job.answer(Scores([], errors, f"{why}{where}"))

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


def _start_process(connection: int, calls: int) -> subprocess.Popen[bytes]:
    """Start a worker's process with these two descriptors. Raises OSError."""
    code = (
        f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
        f"from hwrl.rollout.reward_process import main; main({connection}, {calls}, {os.getpid()})"
    )
    # Not multiprocessing: it would import the main module, which is Ray's in a replica.
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=(connection, calls), process_group=0
    )


def _load_error(what: str, why: str, fix: str) -> DataError:
    return DataError(what, why=why, fix=fix)


def _whole_scores(metrics: list[dict[str, float]], errors: int, failure: str | None, *, count: int) -> Scores:
    """Return the scores of ``count`` responses. Raises ValueError unless they are whole."""
    if len(metrics) != count and failure is None:
        raise ValueError(f"there are {len(metrics)} scores of {count} responses")
    return Scores([dict(each) for each in metrics], int(errors), failure)


def _not_sent(exc: Exception) -> Scores:
    return Scores(errors=1, failure=f"the responses cannot be sent to a reward worker: {short_repr(exc)}")


def _describe(status: int | None) -> str:
    """Say how a process ended."""
    if status is None:
        return "hung"
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
