"""The code of a reward worker's process: load the user's function once, then score one prompt after another.

The process imports neither torch nor numpy, unless the user's function does: so it starts in 0.1 s. With an async
function it scores many prompts at once (:mod:`hwrl.rollout.reward_loop`).

A frame is its length (8 bytes) and its content. A job for the process is its number (8 bytes) and a pickle, because the
``answer`` of a row may be any value; the replica itself writes the pickle. The process sends JSON back: the job's
number and the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from hwrl.errors import HwrlError
from hwrl.rollout.reward import RewardFunction, Scores, ToScore, load_reward, score

JOB = struct.Struct("<Q")
"""A job's number, from 1 on."""
_LENGTH = struct.Struct("<Q")
"""The length of a frame."""
LOADED = 0
"""The number of the first answer. It says that the function is loaded, or has the sentences of the error."""
LOOP_BROKEN = 83
"""The status of a process that ended because its function stopped the event loop, or cancelled tasks of others."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RewardSettings:
    """What a worker calls, and how.

    ``source`` replaces the content of the function's file. ``concurrency`` and ``timeout_s`` are limits for the calls
    of an async function; the replica limits other calls.
    """

    function: str
    source: bytes | None = None
    attempts: int = 3
    batch: bool = False
    concurrency: int = 64
    timeout_s: float = 300.0


class Notes:
    """What a process and its replica know of the newest call, also while the process hangs: memory of both.

    ``descriptor`` is that of a file of at least :attr:`size` bytes.
    """

    size = 4 * 8

    def __init__(self, descriptor: int) -> None:
        # A view writes a number at once. struct's pack_into writes zeros first, and the replica would read them.
        memory = memoryview(mmap.mmap(descriptor, self.size))
        self._times_s, self._numbers = memory.cast("d"), memory.cast("Q")

    def note_call(self, job: int, index: int, attempt: int) -> None:
        """Note that ``attempt`` of call ``index`` of ``job`` begins."""
        self._numbers[1], self._numbers[2], self._numbers[3] = job, index, attempt
        self.note_alive()

    def note_alive(self) -> None:
        """Note that the event loop of the process is alive."""
        self._times_s[0] = time.monotonic()

    def read(self) -> tuple[float, int, int, int]:
        """Return the newest sign of life (seconds of ``time.monotonic``), and the arguments of the newest call."""
        return self._times_s[0], self._numbers[1], self._numbers[2], self._numbers[3]


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send ``content`` as one frame. Blocks until the socket has taken it; raises OSError."""
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_frame(connection: socket.socket) -> bytes:
    """Return the content of the next frame. Blocks; raises EOFError if the other end is closed, or OSError."""
    (nbytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return _receive(connection, nbytes)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    content = bytearray()
    while len(content) < nbytes:
        part = connection.recv(min(nbytes - len(content), 1 << 20))
        if not part:
            raise EOFError("the other end is closed")
        content += part
    return bytes(content)


def main(jobs: int, notes: int, parent: int) -> None:
    """Serve jobs from the socket ``jobs`` until it is closed; note each call in the file ``notes``.

    Both are file descriptors; ``parent`` is the replica's process id. The process ends with its parent. It ignores
    Ctrl-C, because the replica decides when its workers end.
    """
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a killed process loses its buffer
    os.set_inheritable(jobs, False)
    memory = Notes(notes)
    os.close(notes)
    with contextlib.suppress(EOFError, ConnectionError):  # the replica has closed its workers, or is dead
        _serve(socket.socket(fileno=jobs), memory)


def _serve(connection: socket.socket, notes: Notes) -> None:
    settings: RewardSettings = pickle.loads(receive_frame(connection))
    try:
        reward = RewardFunction(load_reward(settings.function, source=settings.source), batch=settings.batch)
    except HwrlError as exc:
        send_frame(connection, answer_of(LOADED, {"error": [exc.what, exc.why, exc.fix]}))
        return
    capacity = settings.concurrency if reward.is_async else 1
    send_frame(connection, answer_of(LOADED, {"columns": astuple(reward.columns), "capacity": capacity}))
    if reward.is_async:
        from hwrl.rollout.reward_loop import serve  # imports asyncio

        serve(connection, reward, settings, notes)
        return
    home = os.getcwd()
    while True:
        job = receive_frame(connection)
        (number,) = JOB.unpack_from(job)
        os.chdir(home)
        result = _score(job[JOB.size :], reward, settings.attempts, partial(notes.note_call, number))
        send_frame(connection, answer_of(number, result))


def answer_of(number: int, result: Any) -> bytes:
    """Return the frame's content for the ``result`` of job ``number``: :class:`Scores`, or the first answer's dict."""
    if isinstance(result, Scores):
        result = [result.metrics, result.errors, result.failure, result.stuck or not _has_standard_files()]
    return json.dumps([number, result]).encode()


def _has_standard_files() -> bool:
    try:
        return all(os.fstat(descriptor) for descriptor in range(3))
    except OSError:
        return False


def _score(job: bytes, reward: RewardFunction, attempts: int, begin: partial[None]) -> Scores:
    try:
        work: ToScore = pickle.loads(job)
        return score(reward, work, attempts=attempts, begin=begin)
    except BaseException as exc:  # noqa: BLE001 - the answer's class is missing here, or an error has no text
        return not_scored(exc)


def not_scored(exc: BaseException) -> Scores:
    """Return the scores of a job that cannot be read, or cannot be scored because of ``exc``."""
    return Scores(errors=1, failure=f"scoring raised {type(exc).__name__}")


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends, also inside of a call. Linux only.

    Elsewhere the process ends after its present call, when it finds its socket closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
