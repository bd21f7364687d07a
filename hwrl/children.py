"""Run code that may hang or end its process in a child process with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO


def run_python(
    words: Sequence[str],
    *,
    limit_s: float,
    stderr: BinaryIO,
    stdout: BinaryIO | int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
) -> int | None:
    """Run Python with the arguments ``words``; return its exit status, or None if it was killed after ``limit_s``.

    The child imports the same hwrl and plugins as this process, and none from its working directory. ``env`` adds to
    its environment. The processes that it started end with it. Blocks.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
