"""Change an environment variable of this process for a short time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_changing = threading.Lock()  # the whole process shares the environment: two changes at once would restore wrong values


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set the environment variable ``name`` to ``value`` inside the block; restore it afterwards.

    For settings that a library reads when it creates an object. Only one thread at a time can enter; others wait.
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
