"""A disk that stops in the middle of a save until the test lets it go on."""

from __future__ import annotations

import threading
from pathlib import Path

from hwrl.checkpoint import DurableFS


class Halting(DurableFS):
    """Stops before the ``number``-th ``operation`` on a file of tensors until ``gate`` opens; may raise then."""

    def __init__(self, operation: str, number: int = 1) -> None:
        super().__init__()
        self._operation, self._left = operation, number
        self.arrived, self.gate = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def halt_again(self) -> None:
        self._left = 1
        self.arrived.clear()
        self.gate.clear()

    def before(self, operation: str, path: Path) -> None:
        if operation == self._operation and path.suffix == ".distcp":
            self._left -= 1
            if self._left == 0:
                self.arrived.set()
                assert self.gate.wait(300)
                if self.error is not None:
                    raise self.error
