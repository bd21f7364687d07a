"""Run code that may hang or end its process in a child process with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

_SHOWN_NBYTES = 8000


def run_python(
    words: Sequence[str],
    *,
    limit_s: float,
    with_stdout: bool = False,
    env: Mapping[str, str] | None = None,
) -> tuple[int | None, list[str]]:
    """Run Python with the arguments ``words``; return its exit status, or None if it was killed after ``limit_s``.

    Also returns the last lines of its standard error, and of its standard output ``with_stdout``. The child imports the
    same hwrl and plugins as this process, and none from its working directory. ``env`` adds to its environment. The
    processes that it started end with it. Blocks.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-P", *words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output if with_stdout else subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_NBYTES))
        return status, output.read().decode(errors="replace").strip().splitlines()
