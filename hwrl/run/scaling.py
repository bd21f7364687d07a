"""A mailbox of two files in the run directory: ``hwrl scale`` writes a request, and the run writes the answer.

The run itself adds and removes replicas in ``Replicas.scale``. Everybody with write access to the run directory may
scale the run. This module imports neither torch nor Ray.
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


def find_mail(directory: Path) -> list[Path]:
    """Return the requests and answers in ``directory``.

    A run removes those that it finds before it locks the directory. Later ones are for itself, even during its start.
    """
    return [path for name in (_REQUEST, _ANSWER) if os.path.lexists(path := directory / name)]


@dataclass(frozen=True)
class ScaleRequest:
    """A request to run the number ``replicas`` of replicas."""

    request_id: str
    replicas: int


class ScaleRequests:
    """The run's end of the mailbox in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def poll(self) -> ScaleRequest | None:
        """Return the pending request, or None, and remove its file, even if it is not valid. Does not block."""
        path = self._directory / _REQUEST
        content = _read(path)
        if content is None:
            return None
        with suppress(OSError):
            path.unlink()
        replicas, request_id = content.get("replicas"), content.get("request_id")
        if type(replicas) is not int or not 0 < replicas <= MOST_PROCESSES or not isinstance(request_id, str):
            return None
        return ScaleRequest(request_id, replicas)

    def answer(self, request: ScaleRequest, *, text: str = "", error: HwrlError | None = None) -> None:
        """Write the outcome of ``request`` for its sender. If the write fails, the sender gets no answer."""
        parts = None if error is None else {"what": error.what, "why": error.why, "fix": error.fix}
        _try_to_write(self._directory / _ANSWER, {"request_id": request.request_id, "text": text, "error": parts})


def request_replicas(directory: Path, replicas: int, *, timeout_s: float = 30.0) -> str:
    """Request ``replicas`` replicas from the run in ``directory``; return its answer. Blocks for up to ``timeout_s``.

    Raises RunDirectoryError if the directory has no run, or the run is not running, does not answer, or refuses.
    """
    _check_runs(directory)
    request = ScaleRequest(uuid.uuid4().hex, replicas)
    try:
        DurableFS().replace_file(directory / _REQUEST, _encode(vars(request)))
        return _wait_for_answer(directory, request, timeout_s)
    except OSError as exc:
        raise RunDirectoryError(
            f"cannot write a request to the run in {directory}", why=str(exc), fix="run this as the user of the run"
        ) from exc


def _check_runs(directory: Path) -> None:
    if not (directory / RUN_CONFIG).is_file():
        raise RunDirectoryError(
            f"there is no run in {directory}",
            why=f"it has no {RUN_CONFIG}",
            fix="name the run directory: `dir` in the run's configuration",
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
            f"the run refused: {error.get('what')}", why=str(error.get("why")), fix=str(error.get("fix"))
        )
    return str(answer.get("text"))


def _withdraw(directory: Path, timeout_s: float) -> RunDirectoryError:
    """Withdraw the request unless the run has already taken it; return the error that describes the case."""
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
    """Return the JSON object in ``path``; an empty one if the content is not one; None if there is no file."""
    try:  # follow no link and open no pipe: reading must not block or leave the run directory
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_MOST_NBYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
