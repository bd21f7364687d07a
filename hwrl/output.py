"""What hwrl prints: it cannot steer a terminal, whatever a file or a plugin wrote, and no lost output is a success."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_STEERING = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|(?!\\A)\r"
)
"""Controls, changes of the writing direction, lone surrogates. A progress bar may begin with a carriage return."""


def printable(text: str) -> str:
    """Return ``text`` with an escape in place of each character that steers a terminal or cannot be encoded.

    >>> printable("tab\\t \\x1b[2J \\u202e \\udcff")
    'tab\\t \\\\x1b[2J \\\\u202e \\\\udcff'
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A text stream that writes :func:`printable` text to ``raw``. ``lost`` is its first error, if it had one."""

    def __init__(self, raw: Any, lost: OSError | None = None) -> None:
        self.raw, self.lost = raw, lost

    def write(self, text: str) -> int:
        """Write ``text``. Raises OSError, which some callers ignore, such as argparse: see :meth:`finish`."""
        self._attempt(lambda: self.raw.write(printable(text)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush ``raw``."""
        self._attempt(self.raw.flush)

    def finish(self) -> None:
        """Flush; raise OSError if this or any earlier output was lost."""
        if self.lost is None:
            self.flush()
        if self.lost is not None:
            raise self.lost

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as exc:
            self.lost = self.lost or exc
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def printable_output() -> Iterator[PrintableStream]:
    """Write standard output and standard error through :class:`PrintableStream` in the block; yield the first.

    If the process was started with a closed stream, its descriptor is occupied first: a file of the run would get the
    number, and what a library prints would be written into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            lost = OSError(errno.EBADF, os.strerror(errno.EBADF)) if name == "stdout" else None
            null = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - it stays open until the process ends
            setattr(sys, name, null if name == "stdin" else PrintableStream(null, lost))
    stream: Any
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a test's stream, or another one that is no file
            stream.reconfigure(errors="backslashreplace")
    before = sys.stdout, sys.stderr
    output = sys.stdout if isinstance(sys.stdout, PrintableStream) else PrintableStream(sys.stdout)
    sys.stdout, sys.stderr = output, PrintableStream(sys.stderr)
    try:
        yield output
    finally:
        sys.stdout, sys.stderr = before


def discard(stream: Any) -> None:
    """Send the buffered and all later output of ``stream`` to /dev/null: its reader has gone, or its disk is full."""
    with suppress(OSError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    if isinstance(stream, PrintableStream):
        stream.lost = None
