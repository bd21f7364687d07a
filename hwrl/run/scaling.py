"""Requests for another number of replicas: ``hwrl scale`` writes a file into the run directory, and the run answers.

Whoever may write the run directory may scale its run. Imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwrl.checkpoint import DurableFS, find_owner
from hwrl.errors import HwrlError, RunDirectoryError
from hwrl.run.config import MOST_PROCESSES, RUN_CONFIG
from hwrl.run.invocation import invoked

_REQUEST, _ANSWER = "scale_request.json", "scale_answer.json"
_MOST_NBYTES = 1 << 16
_LOOK_S = 0.1


@dataclass(frozen=True)
class ScaleRequest:
    """A request for so many ``replicas``."""

    request_id: str
    replicas: int


class ScaleRequests:
    """The run's side. Older files in ``directory`` are from before the run, and are removed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in (_REQUEST, _ANSWER):
            with suppress(OSError):
                (directory / name).unlink()

    def poll(self) -> ScaleRequest | None:
        """Return the waiting request and remove its file; None without one. Does not block; junk is removed, too."""
        path = self._directory / _REQUEST
        found = _read(path)
        if found is None:
            return None
        with suppress(OSError):
            path.unlink()
        replicas, request_id = found.get("replicas"), found.get("request_id")
        if type(replicas) is not int or not 0 < replicas <= MOST_PROCESSES or not isinstance(request_id, str):
            return None
        return ScaleRequest(request_id, replicas)

    def answer(self, request: ScaleRequest, *, text: str = "", error: HwrlError | None = None) -> None:
        """Tell the sender of ``request`` its outcome. If that cannot be written, the sender learns nothing."""
        parts = None if error is None else {"what": error.what, "why": error.why, "fix": error.fix}
        _try_to_write(self._directory / _ANSWER, {"request_id": request.request_id, "text": text, "error": parts})


def request_replicas(directory: Path, replicas: int, *, timeout_s: float = 30.0) -> str:
    """Ask the run in ``directory`` for so many ``replicas``; return its answer. Blocks for ``timeout_s`` at most.

    Raises RunDirectoryError if no run is there, none runs, none answers, or the run refuses.
    """
    _check_runs(directory)
    request = ScaleRequest(uuid.uuid4().hex, replicas)
    try:
        DurableFS().replace_file(directory / _REQUEST, _encode(vars(request)))
        return _wait_for_answer(directory, request, timeout_s)
    except OSError as exc:
        raise RunDirectoryError(
            f"the run in {directory} cannot be asked", why=str(exc), fix="run this as the user of the run"
        ) from exc


def _check_runs(directory: Path) -> None:
    if not (directory / RUN_CONFIG).is_file():
        raise RunDirectoryError(
            f"there is no run in {directory}",
            why=f"it has no {RUN_CONFIG}",
            fix="give the run's directory: `dir` in its configuration",
        )
    if find_owner(directory) is None:
        raise RunDirectoryError(
            f"the run in {directory} is not running",
            why="no process holds its lock",
            fix=f"continue it with: {invoked()} train {directory / RUN_CONFIG} resume=true rollout.replicas=N",
        )


def _wait_for_answer(directory: Path, request: ScaleRequest, timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    while (answer := _read(directory / _ANSWER)) is None or answer.get("request_id") != request.request_id:
        if time.monotonic() > deadline_s:
            raise _withdraw(directory, timeout_s)
        time.sleep(_LOOK_S)
    error = answer.get("error")
    if isinstance(error, dict):
        raise RunDirectoryError(
            f"the run refuses: {error.get('what')}", why=str(error.get("why")), fix=str(error.get("fix"))
        )
    return str(answer.get("text"))


def _withdraw(directory: Path, timeout_s: float) -> RunDirectoryError:
    """Withdraw the request if the run has not taken it; return the error for either case."""
    why = f"it did not take the request within {timeout_s:g} s; it may still be starting"
    fix = "look at its log, and try again; the request is withdrawn"
    try:
        (directory / _REQUEST).unlink()
    except FileNotFoundError:
        why = f"it has taken the request, but did not answer within {timeout_s:g} s"
        fix = "look at its log for the outcome"
    return RunDirectoryError(f"the run in {directory} has not answered", why=why, fix=fix)


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _try_to_write(path: Path, content: dict[str, Any]) -> None:
    with suppress(OSError):
        DurableFS().replace_file(path, _encode(content))


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``; an empty one if it holds none, None if there is no file."""
    try:  # neither a link nor a pipe: this must not block, nor read elsewhere
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_MOST_NBYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
