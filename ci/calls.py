"""How many calls of hwrl send one version: ``python ci/calls.py [device|host]``.

One tensor, one receiver in the same process, Gloo or the host's files. The first versions connect and plan; the fewest
calls of the later ones count, because waiting adds some. A function counts each time that it is entered.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hwrl
from hwrl.comm import serve_store
from hwrl.weights import WeightReceiver, WeightSender
from hwrl_cpu import INFO, CpuBackend

_HOME = str(Path(hwrl.__file__).parent)
_WARM_UP, _VERSIONS = 3, 60


class Calls:
    """Counts the calls of hwrl's functions in the thread that runs :meth:`count`."""

    def __init__(self) -> None:
        self.of: collections.Counter[tuple[str, str]] = collections.Counter()
        self.depth = self.deepest = 0

    def count(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` and count."""
        sys.setprofile(self._see)
        try:
            return work()
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_HOME):
            return
        if event == "call":
            self.of[code.co_filename.removeprefix(_HOME), code.co_qualname] += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
        elif event == "return":
            self.depth -= 1

    @property
    def total(self) -> int:
        """The number of calls."""
        return sum(self.of.values())

    def __str__(self) -> str:
        files = len({file for file, _ in self.of})
        return f"{self.total} calls of {len(self.of)} functions in {files} files, {self.deepest} deep"


def count(transport: str) -> tuple[Calls, Calls]:
    """Return the calls of a publish and of a receive in the steady state."""
    store, backend = serve_store(), CpuBackend(INFO)
    sent, received = list[Calls](), list[Calls]()
    with (
        WeightSender(store, backend=backend, transport=transport) as sender,
        WeightReceiver(store, backend=backend, replica="r0") as receiver,
    ):
        for version in range(_WARM_UP + _VERSIONS):
            sent.append(Calls())
            received.append(Calls())
            thread = threading.Thread(target=received[-1].count, args=(receiver.receive,))
            weights = {"w": torch.full((1024,), float(version))}
            thread.start()
            sent[-1].count(lambda: sender.publish(version, weights))  # noqa: B023 - it is called at once
            thread.join()
    return tuple(min(calls[_WARM_UP:], key=lambda one: one.total) for calls in (sent, received))  # type: ignore[return-value]


def main() -> None:
    """Print both counts; with ``-v`` also the functions."""
    names = [name for name in sys.argv[1:] if name != "-v"] or ["device", "host"]
    for name in names:
        for end, calls in zip(("publish", "receive"), count(name), strict=True):
            print(f"{name} {end}: {calls}")
            if "-v" in sys.argv:
                for (file, function), number in sorted(calls.of.items(), key=lambda one: (one[0][0], -one[1])):
                    print(f"    {number:3} {file} {function}")


if __name__ == "__main__":
    main()
