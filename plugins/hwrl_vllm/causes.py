"""The errors of vLLM's processes: each process appends them to one file, and the rollout process reads it.

vLLM itself reports to the rollout process only that a process failed, and refers to a stack trace in its output.
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
"""The environment variable with the path of the file."""

_LONGEST = 2000
"""The characters of an error's text that are kept."""


class Cause(NamedTuple):
    """Why vLLM failed: the names of the errors' classes and of their base classes, and the errors' text."""

    kinds: frozenset[str]
    text: str

    @property
    def is_out_of_memory(self) -> bool:
        """Whether a device was out of memory."""
        return "OutOfMemoryError" in self.kinds or "out of memory" in self.text

    @property
    def is_of_a_value(self) -> bool:
        """Whether vLLM refused a value, for example of an engine argument."""
        return "ValueError" in self.kinds


class Causes:
    """The rollout process's end of the file. The processes that it starts afterwards append to the file."""

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="hwrl-vllm-", suffix=".jsonl")
        os.close(descriptor)
        self._path = Path(path)
        os.environ[CAUSES] = path

    def of(self, error: Exception) -> Cause:
        """Return the errors of vLLM's processes since the last call, oldest first. Without any, return ``error``."""
        lines: list[str] = []
        with suppress(OSError):
            lines = self._path.read_text(encoding="utf-8").splitlines()
        self.clear()
        found = [Cause(frozenset(kinds), text) for kinds, text in map(json.loads, lines)] or [_cause_of(error)]
        texts = dict.fromkeys(cause.text for cause in found)
        return Cause(frozenset().union(*(cause.kinds for cause in found)), "; then ".join(texts))

    def clear(self) -> None:
        """Drop the errors so far."""
        with suppress(OSError):
            os.truncate(self._path, 0)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class _FileHandler(logging.Handler):
    """Appends each logged exception to the owner's file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if isinstance(error, Exception):
            kinds, text = _cause_of(error)
            with suppress(OSError):  # the owner has ended and removed the file
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
                try:
                    os.write(file, f"{json.dumps([sorted(kinds), text])}\n".encode())
                finally:
                    os.close(file)


def report_errors() -> None:
    """Append each error that vLLM logs in this process from now on to the owner's file, if there is one."""
    path = os.environ.get(CAUSES)
    if path:
        logging.getLogger("vllm").addHandler(_FileHandler(path))


def _cause_of(error: Exception) -> Cause:
    return Cause(
        frozenset(kind.__name__ for kind in type(error).__mro__), f"{type(error).__name__}: {error}"[:_LONGEST]
    )
