"""The process of one way to save: its commands over a pipe, and its memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.errors import HwrlError
from hwrl_bench.checkpoint_ways import WAYS, SaveWay, SaveWorkload
from hwrl_bench.ways import one_line

if TYPE_CHECKING:
    from hwrl_bench.checkpoint_training import BenchTraining

_SAMPLE_S = 0.05
_END_S = 30.0


class SaveProcess:
    """Runs one way in a session of processes; leaving the context ends all of them.

    Send a command with :meth:`request`: "step", "save" or "measure". ``timeout_s`` is for the whole life.
    """

    def __init__(self, name: str, workload: SaveWorkload, *, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # no daemon: a way may start processes
        self._pipe, self._child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._child_pipe, name, workload))
        self._timeout_s = timeout_s

    def __enter__(self) -> SaveProcess:
        self._deadline = time.monotonic() + self._timeout_s
        self._process.start()
        self._child_pipe.close()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self._pipe.send("end")
            self._process.join(_END_S)
        with contextlib.suppress(ProcessLookupError):  # the child had no session yet
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None, "started"
        return self._process.pid

    def request(self, command: str) -> Any:
        """Send a command and return its answer; raise HwrlError if there is none."""
        with contextlib.suppress(BrokenPipeError):  # the child ended: receive says why
            self._pipe.send(command)
        return self.receive()

    def receive(self) -> Any:
        """Return the next answer; the first one is the size of the state. Raise HwrlError if there is none."""
        if not self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
            raise _no_answer(f"it took longer than {self._timeout_s:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(_END_S)
            raise _no_answer(f"its process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise _no_answer(answer)
        return answer

    @contextlib.contextmanager
    def memory(self) -> Iterator[dict[str, int]]:
        """Sample the memory of the way's processes during the block; the dict then holds the peaks."""
        peaks = _host_memory(self._pid)
        done = threading.Event()

        def sample() -> None:
            while not done.wait(_SAMPLE_S):
                for key, nbytes in _host_memory(self._pid).items():
                    peaks[key] = max(peaks[key], nbytes)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield peaks
        finally:
            done.set()
            thread.join()


def _no_answer(why: str) -> HwrlError:
    return HwrlError("a way was not measured", why=why, fix="read the output of its process")


def _host_memory(session: int) -> dict[str, int]:
    """Return the bytes of memory that the processes of ``session`` hold, and those in use on the whole machine.

    Proportional set size: a page of several processes counts once among them, shared memory included.
    """
    held = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                held += _field_nbytes(entry / "smaps_rollup", "Pss:")
    meminfo = Path("/proc/meminfo")
    used = _field_nbytes(meminfo, "MemTotal:") - _field_nbytes(meminfo, "MemAvailable:")
    return {"held_nbytes": held, "machine_nbytes": used}


def _field_nbytes(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


# -- in the process ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, name: str, workload: SaveWorkload) -> None:
    """Answer commands until "end". Everything that this process starts is in its session."""
    os.setsid()
    try:
        from hwrl_bench.checkpoint_training import BenchTraining

        training = BenchTraining(workload)
        pipe.send({"payload_nbytes": training.nbytes, "staged_nbytes": training.staged_nbytes})
        saves = _Saves(training, name, workload)
        commands = {"step": saves.step, "save": saves.save, "measure": saves.measure}
        while (command := pipe.recv()) != "end":
            pipe.send(commands[command]())
        saves.close()
    except Exception as exc:  # noqa: BLE001 - another package may fail in any way; the table shows the reason
        pipe.send(one_line(exc))


class _Saves:
    """The measurements of one way; each returns seconds by name."""

    def __init__(self, training: BenchTraining, name: str, workload: SaveWorkload) -> None:
        self._training, self._workload = training, workload
        self._kind, self._directory = WAYS[name], workload.directory / name.replace(" ", "-")
        self._way: SaveWay | None = None
        self._count = 0

    def step(self) -> dict[str, float]:
        """Take a step while no save runs."""
        return {"step_s": self._training.step()}

    def save(self) -> dict[str, float]:
        """Save, idle for a rollout, take a step, and wait until the save is complete."""
        if self._way is None:
            self._directory.mkdir()
            self._way = self._kind(self._training, self._workload, self._directory)
        self._count += 1
        self._training.backend.synchronize()
        begin = time.perf_counter()
        with self._training.offloader.lending():
            self._way.save(self._count)
        blocked_s = time.perf_counter() - begin
        with ThreadPoolExecutor(1) as executor:
            complete_s = executor.submit(_seconds_until_complete, self._way, begin)
            time.sleep(self._workload.rollout_s)
            next_step_s = self._training.step(self._way.before_change)
            return {"blocked_s": blocked_s, "next_step_s": next_step_s, "complete_s": complete_s.result()}

    def measure(self) -> dict[str, float]:
        """Take the raw copy, a step by itself, and a save with the step after it."""
        return {"raw_s": self._training.copy_raw(), **self.step(), **self.save()}

    def close(self) -> None:
        """Close the way."""
        if self._way is not None:
            self._way.close()


def _seconds_until_complete(way: SaveWay, begin: float) -> float:
    way.wait()
    return time.perf_counter() - begin
