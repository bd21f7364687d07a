"""A disk that holds a save at its first file."""

from __future__ import annotations

import threading
from pathlib import Path

from hwrl.checkpoint import DurableFS


class Gated(DurableFS):
    """Holds every save, or with ``only`` those with that in their path, until the gate is opened; may then fail."""

    def __init__(self, *, only: str = "") -> None:
        super().__init__()
        self.only = only
        self.arrived, self.gate = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.suffix == ".distcp" and self.only in str(path):
            self.arrived.set()
            assert self.gate.wait(300)
            if self.error is not None:
                raise self.error
