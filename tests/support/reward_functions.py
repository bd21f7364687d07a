"""Reward functions for tests of reward workers, which load them by name. ``answer`` carries their orders."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_calls = 0


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


def leaves_a_child(prompt: str, response: str, answer: str) -> float:
    """Write the number of a child process to the file ``answer``, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    Path(answer).write_text(str(child.pid))
    return float(child.wait())


def _hold_the_lock() -> None:
    """Compute in C for hours, and never let another thread of this process run."""
    sum(iter(int, 1))


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
    "close everything": lambda: os.closerange(0, 1000),
    "print": lambda: print("x" * (1 << 20)),
    "ignore Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
    "set an alarm": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
}
