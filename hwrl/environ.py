"""The environment of this process, changed for a moment."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_changing = threading.Lock()  # the environment is the process's, so two changes at once would restore each other's


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """While this is entered, the environment variable ``name`` is ``value``; afterwards it is what it was.

    For what a library reads once, when it makes something. One thread at a time; the others wait.
    """
    with _changing:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before
