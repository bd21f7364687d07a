"""Why one of vLLM's processes failed: each writes its errors to a file of the rollout process.

vLLM itself tells the rollout process only that a process failed, and names a stack trace in its output.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CAUSES = "HWRL_VLLM_CAUSES"
"""The environment variable with the file's path."""

_LONGEST = 2000
"""An error's longest text, in characters."""


class Cause(NamedTuple):
    """Why vLLM failed: the names of the errors' classes with their bases, and the errors' text."""

    kinds: frozenset[str]
    text: str

    @property
    def is_out_of_memory(self) -> bool:
        """Whether a device had no room."""
        return "OutOfMemoryError" in self.kinds or "out of memory" in self.text

    @property
    def is_of_a_value(self) -> bool:
        """Whether vLLM refused a value."""
        return "ValueError" in self.kinds


class Causes:
    """The file of a rollout process, for the processes that it starts afterwards."""

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="hwrl-vllm-", suffix=".jsonl")
        os.close(descriptor)
        self._path = Path(path)
        os.environ[CAUSES] = path

    def of(self, error: Exception) -> Cause:
        """Return the errors of vLLM's processes since the last call, oldest first; without one, ``error``."""
        lines: list[str] = []
        with suppress(OSError):
            lines = self._path.read_text(encoding="utf-8").splitlines()
        self.clear()
        found = (
            [_named(error)] if not lines else [Cause(frozenset(kinds), text) for kinds, text in map(json.loads, lines)]
        )
        texts = dict.fromkeys(cause.text for cause in found)
        return Cause(frozenset().union(*(cause.kinds for cause in found)), "; then ".join(texts))

    def clear(self) -> None:
        """Forget the errors until now."""
        with suppress(OSError):
            os.truncate(self._path, 0)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class _Teller(logging.Handler):
    """Appends each logged exception to the file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if isinstance(error, Exception):
            kinds, text = _named(error)
            with suppress(OSError):  # the owner has ended
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
                try:
                    os.write(file, f"{json.dumps([sorted(kinds), text])}\n".encode())
                finally:
                    os.close(file)


def tell_errors() -> None:
    """Append the errors that vLLM logs in this process to its owner's file, if there is one."""
    path = os.environ.get(CAUSES)
    if path:
        logging.getLogger("vllm").addHandler(_Teller(path))


def _named(error: Exception) -> Cause:
    return Cause(
        frozenset(kind.__name__ for kind in type(error).__mro__), f"{type(error).__name__}: {error}"[:_LONGEST]
    )
