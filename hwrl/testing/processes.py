"""Run a function in several real processes; a test may kill one of them."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from hwrl.environ import variable
from hwrl.errors import HwrlError
from hwrl.testing.limits import scaled

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_started = threading.Event()  # set when the fork server starts; it forks each rank
_preloaded = ["hwrl.testing.uncollected", "torch.distributed.tensor", "hwrl.comm"]
_GRACE_S = 5.0  # after a rank failed, the time for the others to report: they often wait for the failed one
_SHOW_STACKS = signal.SIGUSR1
_SHOW_S = 1.0


@dataclass(frozen=True)
class RankOutcome:
    """The end of one rank: the function's return ``value``, or an ``error``."""

    rank: int
    value: Any = None
    error: BaseException | None = None


def preload(*modules: str) -> None:
    """Import ``modules`` in the fork server, so that no rank spends time on them.

    Call it before the first :func:`run_processes` or :class:`Processes`; after that, new ``modules`` raise HwrlError.
    The import must start no thread and open no device: neither survives a fork.
    """
    new = [module for module in modules if module not in _preloaded]
    if new and _started.is_set():
        raise HwrlError(
            f"cannot import {', '.join(new)} for all processes",
            why="the process that they are forked from has already started",
            fix="call preload before the first run_processes or Processes, for example in conftest.py",
        )
    _preloaded.extend(new)


def run_processes(target: Callable[..., Any], size: int, *args: Any, timeout_s: float = 1200.0) -> list[Any]:
    """Run ``target(rank, *args)`` in ``size`` processes and return the results by rank.

    Blocks until all ranks end. ``target`` is a module-level function; arguments and results are pickled. If ranks
    fail, raises the exception of the first one in time, with the rank and its traceback as a note; the others have
    five seconds to end. A rank that still runs after ``timeout_s`` prints the stacks of its threads and is killed:
    HwrlError. No process outlives the call.

    >>> import math
    >>> run_processes(math.ldexp, 2, 3)
    [0.0, 8.0]
    """
    with Processes(target, size, *args, timeout_s=timeout_s) as processes:
        ended = processes.outcomes(stop_on_error=True)
    failed = [outcome.error for outcome in ended if outcome.error is not None]
    if failed:
        raise failed[0]
    return [outcome.value for outcome in sorted(ended, key=lambda outcome: outcome.rank)]


class Processes:
    """``size`` processes with ``target(rank, *args)``; leaving the context kills the running ones.

    The processes start on entry, and ``timeout_s`` (times the variable ``HWRL_TIMEOUT_SCALE``, if that is set) counts
    from there for all of them. Each uses one torch thread. Its
    environment is the one of this process when the object was made. But torch, ``hwrl.comm`` and the modules of
    :func:`preload` are imported once, for the first processes; what they read from the environment then stays.
    """

    def __init__(self, target: Callable[..., Any], size: int, *args: Any, timeout_s: float = 1200.0) -> None:
        self._target, self._size, self._timeout_s = _Target.of(target), size, scaled(timeout_s)
        self._payload = pickle.dumps((dict(os.environ), args))
        self._deadline = 0.0
        self._children: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._ended: dict[int, RankOutcome] = {}

    def __enter__(self) -> Processes:
        context = _forking_context()
        self._deadline = time.monotonic() + self._timeout_s
        for rank in range(self._size):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(self._target, rank, self._payload, theirs), daemon=True)
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(mine)
        return self

    def __exit__(self, *exc: object) -> None:
        for child, pipe in zip(self._children, self._pipes, strict=True):
            child.kill()
            child.join()
            pipe.close()
            child.close()

    def kill(self, rank: int) -> None:
        """Kill ``rank`` with SIGKILL; its outcome is then an error. Does nothing if the rank has ended."""
        self._children[rank].kill()

    def wait(self, rank: int) -> RankOutcome:
        """Block until ``rank`` ends or the deadline comes; return its outcome. At the deadline that is an error."""
        if rank not in self._ended:
            self._ended[rank] = self._read(rank, self._deadline)
        return self._ended[rank]

    def outcomes(self, *, stop_on_error: bool = False) -> list[RankOutcome]:
        """Block until every rank ends or the deadline comes; return the outcomes in the order in which ranks ended.

        With ``stop_on_error``, the deadline moves to five seconds after the first failure.
        """
        waiting = [rank for rank in range(self._size) if rank not in self._ended]
        deadline = self._deadline
        while waiting:
            for rank in self._wait_for_some(waiting, deadline) or list(waiting):
                waiting.remove(rank)
                self._ended[rank] = self._read(rank, deadline)
                if stop_on_error and self._ended[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return list(self._ended.values())

    def _wait_for_some(self, ranks: list[int], deadline: float) -> list[int]:
        """Block until some of ``ranks`` have sent an outcome or ended; return them, or none at the deadline."""
        # The sentinel, too: forked children of a dead rank may keep its pipe open.
        signals: dict[int, set[Any]] = {rank: {self._pipes[rank], self._children[rank].sentinel} for rank in ranks}
        seen = wait(set().union(*signals.values()), max(0.0, deadline - time.monotonic()))
        return [rank for rank in ranks if not signals[rank].isdisjoint(seen)]

    def _read(self, rank: int, deadline: float) -> RankOutcome:
        pipe, child = self._pipes[rank], self._children[rank]
        if not self._wait_for_some([rank], deadline):
            assert child.pid is not None, "started in __enter__"
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, _SHOW_STACKS)
                child.join(_SHOW_S)  # time to print; the signal kills a rank that has no handler yet
            return RankOutcome(rank, error=_no_result(rank, "it was still running at the deadline"))
        try:
            if not pipe.poll():
                raise EOFError
            packed = pipe.recv_bytes()
        except (EOFError, OSError):  # OSError: it was killed in the middle of its result
            child.join()
            return RankOutcome(rank, error=_no_result(rank, f"it ended with exit code {child.exitcode}"))
        value, error, text = pickle.loads(packed)
        if error is not None:
            error.add_note(f"in rank {rank}:\n{text}")
        return RankOutcome(rank, value, error)


def _forking_context() -> Any:
    """Return a multiprocessing context with a fork server, which has imported torch and the :func:`preload` modules.

    This saves seconds per child. The server loads no device library, because those do not survive a fork. So torch's
    autoloading of extensions is off in the server, and each child does it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    _started.set()
    with variable(_AUTOLOAD, "0"):
        forkserver.ensure_running()
    return context


def _no_result(rank: int, why: str) -> HwrlError:
    return HwrlError(f"rank {rank} gave no result", why=why, fix="look at its output")


@dataclass(frozen=True)
class _Target:
    """Where a child finds a function. A test module may not be importable by its name, so the file is here, too."""

    module: str
    name: str
    file: str | None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Target:
        module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
        if module is None or not name.isidentifier():  # "<lambda>", "Class.method", "function.<locals>.inner"
            raise HwrlError(
                f"cannot run {function!r} in another process",
                why="it is not a module-level function",
                fix="move it to the top level of a module",
            )
        return cls(module.__name__, name, getattr(module, "__file__", None))

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._module(), self.name)
        return function

    def _module(self) -> Any:
        if self.module in sys.modules:
            return sys.modules[self.module]
        if self.file is None or self._is_importable():
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None and spec.loader is not None, "a Python file"
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _is_importable(self) -> bool:
        try:
            found = importlib.util.find_spec(self.module)
        except ModuleNotFoundError:  # a parent package is missing
            return False
        return found is not None and found.origin == self.file


def _child(target: _Target, rank: int, payload: bytes, pipe: Connection) -> None:
    import torch

    gc.freeze()  # else a collection writes to all inherited objects, and so copies their memory: half a second
    gc.enable()
    faulthandler.register(_SHOW_STACKS, file=2, all_threads=True)
    torch.set_num_threads(1)
    value, error, text = None, None, ""
    try:
        environment, args = pickle.loads(payload)
        os.environ.clear()
        os.environ.update(environment)
        if torch._is_device_backend_autoload_enabled():  # torch calls both at its import; neither has a public name
            torch._import_device_backends()
        value = target.load()(rank, *args)
    except BaseException as exc:  # noqa: BLE001 - whatever ended this rank is re-raised in the parent
        error, text = exc, traceback.format_exc()
    pipe.send_bytes(_pack(value, error, text))
    pipe.close()


def _pack(value: Any, error: BaseException | None, text: str) -> bytes:
    try:
        packed = pickle.dumps((value, error, text))
        pickle.loads(packed)
    except Exception as exc:  # noqa: BLE001 - a foreign exception may fail in any way when it is pickled
        lost = HwrlError(f"a rank's outcome cannot be sent: {exc!r}", why=repr(error or value), fix="return plain data")
        return pickle.dumps((None, lost, text))
    return packed
