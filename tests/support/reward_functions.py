"""Reward functions for tests of reward workers, which load them by name. ``answer`` carries their orders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_calls = 0
_running = _most_running = 0


def length(prompt: str, response: str, answer: object) -> float:
    return float(len(response.split()))


def obey(prompt: str, response: str, answer: Any) -> float:
    """Do what ``answer`` says to the response "1 2"; every other response scores 1."""
    if response == "1 2":
        _ORDERS[answer]()
    return 1.0


def identify(prompt: str, response: str, answer: object) -> dict[str, float]:
    """Report this process, its calls, and the large modules in it."""
    global _calls
    _calls += 1
    large = {"torch", "transformers", "numpy", "ray"} & set(sys.modules)
    return {"reward": 1.0, "pid": os.getpid(), "calls": _calls, "large": len(large)}


def takes_a_while(prompt: str, response: str, answer: float) -> dict[str, float]:
    time.sleep(answer)
    return {"reward": 1.0, "pid": os.getpid()}


def fails_twice(prompt: str, response: str, answer: object) -> float:
    global _calls
    _calls += 1
    if _calls <= 2:
        raise ZeroDivisionError("no luck")
    return 1.0


def forks(prompt: str, response: str, answer: object) -> dict[str, float]:
    """Report this process, which has a forked child."""
    _child()
    return {"reward": 1.0, "pid": os.getpid()}


def leaves_a_child(prompt: str, response: str, answer: str) -> float:
    """Write the number of a child process to the file ``answer``, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    Path(answer).write_text(str(child.pid))
    return float(child.wait())


async def ponder(prompt: str, response: str, answer: float, *, source: str = "?") -> dict[str, float]:
    """Wait for ``answer`` seconds, and report how many calls ran at once, at most so far."""
    global _running, _most_running
    _running += 1
    _most_running = max(_most_running, _running)
    try:
        await asyncio.sleep(answer)
        return {"reward": len(response.split()), "most": _most_running, "pid": os.getpid()}
    finally:
        _running -= 1


async def obey_later(prompt: str, response: str, answer: Any) -> float:
    """As ``obey``, in an event loop; "refuse to end" swallows the cancellation."""
    await asyncio.sleep(0.01)
    while answer == "refuse to end" and response == "1 2":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)
    if answer == "wait" and response == "1 2":
        await asyncio.sleep(1e6)
    if answer in _ORDERS:
        obey(prompt, response, answer)
    return 1.0


async def breaks_its_loop(prompt: str, response: str, answer: Any) -> float:
    """Break what ``answer`` names at the response "1 2", while the calls of other prompts wait."""
    await asyncio.sleep(0.05)
    if response != "1 2" or not answer:
        await asyncio.sleep(0.3)
        return 1.0
    loop, tasks, own = asyncio.get_running_loop(), asyncio.all_tasks(), asyncio.current_task()
    if answer == "stop the loop":
        loop.stop()
    elif answer == "exit in a task":
        await asyncio.create_task(_exits())
    elif answer == "cancel the oldest":
        min(tasks, key=lambda task: int(task.get_name().removeprefix("Task-"))).cancel()
    else:
        for task in tasks:
            if answer == "cancel all" or task is not own:
                task.cancel()
    await asyncio.sleep(1e6)
    return 0.0


async def _exits() -> None:
    sys.exit(3)


def rank_all(prompts: list[str], responses: list[str], answers: list[Any], level: list[int]) -> list[Any]:
    """Score all responses of a prompt by their place; ``answer`` may ask for another result."""
    results: dict[str, Any] = {"too few": [1.0], "no list": 1.0, "one None": [1.0, None, 1.0]}
    if answers[0] in results:
        return results[answers[0]]  # type: ignore[no-any-return] # the wrong type is the point
    assert len({len(column) for column in (prompts, responses, answers, level)}) == 1
    return [{"reward": level[0] + index} for index in range(len(responses))]


def names_columns(prompt: str, response: str, answer: object, level: int, *, unit: str = "none") -> dict[str, float]:
    return {"reward": level, "unit": len(unit)}


def takes_all(prompt: str, response: str, answer: object, /, **columns: object) -> float:
    return float(sorted(columns) == ["level", "prompt", "source", "unit"])


def cannot_judge(prompt: str, response: str, answer: object) -> float | None:
    """Count the calls in the file ``answer``, and judge only responses with another length than two."""
    with Path(str(answer)).open("a") as file:
        file.write("x")
    return None if response == "1 2" else 1.0


def sets_an_alarm(prompt: str, response: str, answer: object) -> float:
    """End an endless computation by a signal, as some libraries do. This works in a main thread only."""

    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with contextlib.suppress(TimeoutError):
        while True:
            time.sleep(0.01)
    return 1.0


def _hold_the_lock() -> None:
    """Compute in C for hours, and never let another thread of this process run."""
    sum(iter(int, 1))


def _child() -> int:
    """Return the number of a forked child, which waits and holds all that is open here."""
    pid = os.fork()
    while not pid:
        signal.pause()
    return pid


def _raise(error: BaseException) -> None:
    raise error


class _Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no text")


_ORDERS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(1e6),
    "hold the lock": _hold_the_lock,
    "raise": lambda: _raise(ZeroDivisionError("no luck")),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "cancel": lambda: _raise(asyncio.CancelledError()),
    "end a generator": lambda: _raise(GeneratorExit()),
    "raise without a text": lambda: _raise(_Unprintable()),
    "raise a long text": lambda: _raise(ValueError("x" * 10_000)),
    "end the process": lambda: os._exit(7),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "run out of memory": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fork and run out of memory": lambda: os.kill(os.getpid(), signal.SIGKILL * bool(_child())),
    "close everything": lambda: os.closerange(0, 1 + max(map(int, os.listdir("/proc/self/fd")))),
    "leave the directory": lambda: os.chdir("/proc"),
    "close the standard files": lambda: os.closerange(0, 3),
    "print": lambda: print("x" * (1 << 20)),
    "ignore Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
    "set an alarm": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
}
