"""Run a user's code for the first time, in a child process with a time limit, before the run starts anything.

Whatever the code does there, it ends the child only: it may end its process, hang, or print without end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from hwrl.errors import DataError, HwrlError, short_repr

LIMIT_S = 300.0
_POLL_S = 0.5
_SHOWN_CHARACTERS = 300


def try_in_child(check: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Any:
    """Return the result of ``check(step, *arguments)`` in a child process.

    ``check`` calls ``step(text)`` before each part of its work; the text names the key and the user's function. Raises
    the HwrlError of ``check``. Raises DataError with the last text if the child ends without a result or takes longer
    than ``limit_s``. The child's output is not shown; the error has its end.
    """
    # A fork costs nothing, but only a process with one thread can be forked safely.
    context: Any = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
    (answers, answer), (outputs, output) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(answer, output, check, arguments), daemon=False)
    child.start()
    answer.close()
    output.close()
    step, printed, deadline_s = "the user's code", b"", time.monotonic() + limit_s
    try:
        waiting: set[Any] = {answers, outputs, child.sentinel}
        while True:
            ready = wait(list(waiting), timeout=_POLL_S)
            if outputs in ready:
                printed = (printed + (chunk := os.read(outputs.fileno(), 65536)))[-_SHOWN_CHARACTERS:]
                waiting -= set() if chunk else {outputs}
            if answers in ready:
                try:
                    kind, value = answers.recv()
                except EOFError:
                    waiting.discard(answers)
                    continue
                if kind == "result":
                    return value
                if kind == "error":
                    raise value
                step = value
            elif child.exitcode is not None:  # its children may keep the sentinel open
                raise _failed(step, f"it ended its process, with status {child.exitcode}", printed)
            if time.monotonic() >= deadline_s:
                raise _failed(step, f"it did not return within {limit_s:g} s", printed)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # the processes that the code has started, too
        child.kill()
        child.join()


def _run(answer: Connection, output: Connection, check: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115 - to the end
    last = ["the user's code"]

    def step(text: str) -> None:
        last[0] = text
        answer.send(("step", text))

    try:
        answer.send(("result", check(step, *arguments)))
    except HwrlError as exc:
        answer.send(("error", exc))
    except BaseException as exc:  # noqa: BLE001 - users' code may raise anything
        answer.send(("error", _failed(last[0], f"it raised {short_repr(exc)}", b"")))


def _failed(step: str, why: str, printed: bytes) -> DataError:
    text = " ".join(printed.decode(errors="replace").split())
    return DataError(
        f"{step} failed in its first use",
        why=f"{why}{f'; its output ended with {text!r}' if text else ''}",
        fix="correct the code; a script's own work belongs under `if __name__ == '__main__':`",
    )
