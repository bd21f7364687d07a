"""The replica's end of a reward worker's process: :class:`RewardProcess`."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from hwrl.errors import DataError
from hwrl.interfaces import Ints
from hwrl.rollout.data import Prompt
from hwrl.rollout.reward import RewardColumns, Scores, where
from hwrl.rollout.reward_process import JOB, LOADED, LOOP_BROKEN, Notes, RewardSettings, send_frame


@dataclass(eq=False)
class ScoringJob:
    """A prompt with responses to score. ``message`` is the pickled job for the process.

    ``alone`` is true after a process was lost with this job in it. The job then gets another process, without other
    jobs, so that the next loss shows that this job is guilty. ``errors`` counts the losses without other jobs.
    """

    prompt: Prompt
    responses: Sequence[Ints]
    number: int
    scores: Future[Scores] = field(default_factory=Future)
    queued_s: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)
    message: bytes = b""
    alone: bool = False
    errors: int = 0

    def answer(self, scores: Scores) -> None:
        """Set the result, unless the future is cancelled."""
        scores.errors += self.errors
        with contextlib.suppress(InvalidStateError):
            self.scores.set_result(scores)


class RewardProcess:
    """One worker process. It has one job at a time; with an async function, several jobs.

    Raises OSError if it cannot start, or does not read its settings within ``frame_timeout_s``.
    """

    def __init__(self, settings: RewardSettings, *, frame_timeout_s: float) -> None:
        self._frame_timeout_s = frame_timeout_s
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(frame_timeout_s)
        with contextlib.ExitStack() as started:
            started.enter_context(self.connection)
            with theirs, tempfile.TemporaryFile() as notes:
                notes.truncate(Notes.size)
                code = (
                    f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
                    "from hwrl.rollout.reward_process import main; "
                    f"main({theirs.fileno()}, {notes.fileno()}, {os.getpid()})"
                )
                # Not multiprocessing: it would import the main module, which is Ray's in a replica.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), notes.fileno()),
                    process_group=0,
                )
                self._notes = Notes(notes.fileno())
            started.pop_all()  # nothing has failed: the connection stays open
        self.is_loading = True
        self.columns = RewardColumns()
        self.jobs: dict[int, ScoringJob] = {}
        self._capacity, self._batch, self._stuck = 1, settings.batch, False
        self._busy_since_s = time.monotonic()  # loading the function counts as a job
        try:
            send_frame(self.connection, pickle.dumps(settings))
        except TimeoutError:  # the process has part of a frame, and would wait for the rest
            self.end()
            raise
        except OSError:  # it is dead; the next read finds that
            pass

    @property
    def is_idle(self) -> bool:
        """Whether no answer of the process is due."""
        return not self.is_loading and not self.jobs

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended and nothing that it sent is unread. A child of it may hold the socket open."""
        if self._process.poll() is None:
            return False
        unread = select.poll()
        unread.register(self.connection, select.POLLIN)
        return not unread.poll(0)

    @property
    def must_end(self) -> bool:
        """Whether one call in it could not be cancelled, and no job is left in it."""
        return self._stuck and not self.jobs

    def has_room_for(self, job: ScoringJob) -> bool:
        """Return whether ``job`` may be sent now. An async function has room until its calls reach the limit."""
        if self.is_loading or self._stuck:
            return False
        if not self.jobs:
            return True
        alone = job.alone or any(other.alone for other in self.jobs.values())
        return not alone and sum(len(other.responses) for other in self.jobs.values()) < self._capacity

    def send(self, job: ScoringJob) -> None:
        """Send ``job`` to the process. Raises OSError if the process is dead or does not read; it has the job then."""
        if not self.jobs:
            self._busy_since_s = time.monotonic()
        self.jobs[job.number] = job
        send_frame(self.connection, JOB.pack(job.number) + job.message)

    @property
    def called_s(self) -> float:
        """When the process last began a call or noted that it is alive, in seconds of ``time.monotonic``."""
        return max(self._busy_since_s, self._notes.read()[0])

    def take_answer(self, frame: bytes) -> DataError | None:
        """Take the answer in ``frame``: the scores of a job, or whether the function is loaded.

        Returns the error if the function cannot be loaded. Raises ValueError, TypeError or KeyError if no such answer
        is due.
        """
        number, result = json.loads(frame)
        if self.is_loading and number == LOADED:
            self.is_loading = False
            if "error" in result:
                what, why, fix = result["error"]
                return DataError(what, why=why, fix=fix)
            self.columns, self._capacity = RewardColumns(*result["columns"]), result["capacity"]
            return None
        job = self.jobs.get(number) if isinstance(number, int) else None
        if job is None or self.is_loading:
            raise ValueError(f"{number} is no number of a job")
        metrics, errors, failure, stuck = result
        if len(metrics) != len(job.texts) and failure is None:
            raise ValueError(f"there are {len(metrics)} scores of {len(job.texts)} responses")
        scores = Scores([dict(each) for each in metrics], int(errors), failure, bool(stuck))
        del self.jobs[number]
        self._stuck |= scores.stuck
        job.answer(scores)
        return None

    def fail(self, why: str) -> None:
        """Fail the only job of an ended process, with the reason ``why``."""
        (job,) = self.jobs.values()
        _, number, index, attempt = self._notes.read()
        if number != job.number:  # no call of it has begun
            index, attempt = 0, 1
        one_by_one = job.texts and self._capacity == 1 and not self._batch
        job.answer(Scores([], attempt, f"{why} {where(job.texts, index if one_by_one else None)}"))

    def end(self, *, grace_s: float = 0.0) -> str:
        """Wait up to ``grace_s`` for the process's end; kill it, and all that it started; return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._frame_timeout_s)
        self.connection.close()
        return _describe(self._process.returncode)


def _describe(status: int | None) -> str:
    """Return how a process with the return code ``status`` ended; None: it lives."""
    if status is None:
        return "hung"
    if status == LOOP_BROKEN:
        return "ended, because its event loop was stopped or tasks of other calls were cancelled,"
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
