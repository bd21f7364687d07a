"""``hwrl scale``: one file in the run directory holds a request, and then the run's answer to it.

The run itself adds and removes replicas in ``Replicas.scale``. Everybody with write access to the run directory may
scale the run. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from hwrl.checkpoint import find_owner
from hwrl.errors import HwrlError, RunDirectoryError
from hwrl.files import read_file, replacing
from hwrl.run.config import MOST_PROCESSES, RUN_CONFIG
from hwrl.run.invocation import invoked

SCALE = "scale.json"
_MOST_NBYTES = 1 << 16
_LOOK_S = 0.1


def pending_request(directory: Path, *, carried_out: str = "") -> dict[str, Any] | None:
    """Return the request in ``directory`` if it has no answer yet: its ``id`` and the number of ``replicas``.

    Removes an invalid one. ``carried_out`` is the id of the last request: its answer may have failed. Does not block.
    """
    request = _read(directory)
    if request is None or "answer" in request:
        return None
    replicas, name = request.get("replicas"), request.get("id")
    if type(replicas) is int and 0 < replicas <= MOST_PROCESSES and isinstance(name, str):
        return None if name == carried_out else request
    with suppress(OSError):
        (directory / SCALE).unlink()
    return None


def answer_request(directory: Path, request: dict[str, Any], *, text: str = "", error: HwrlError | None = None) -> None:
    """Write the answer to ``request``, unless another request has replaced it. If that fails, it gets no answer."""
    if (_read(directory) or request).get("id") != request["id"]:
        return
    parts = None if error is None else {"what": error.what, "why": error.why, "fix": error.fix}
    with suppress(OSError):
        _write(directory, {**request, "answer": text, "error": parts})


def request_replicas(directory: Path, replicas: int, *, timeout_s: float = 30.0) -> str:
    """Request ``replicas`` replicas from the run in ``directory``; return its answer. Blocks for up to ``timeout_s``.

    Raises RunDirectoryError if the directory has no run, or the run is not running, does not answer, or refuses; also
    if another command replaces the request.
    """
    _check_runs(directory)
    request = {"id": uuid.uuid4().hex, "replicas": replicas}
    try:
        _write(directory, request)
    except OSError as exc:
        raise RunDirectoryError(
            f"cannot write a request to the run in {directory}", why=str(exc), fix="run this as the user of the run"
        ) from exc
    deadline_s = time.monotonic() + timeout_s
    try:
        while (content := _read(directory) or {}).get("id") == request["id"] and "answer" not in content:
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
    finally:  # of Ctrl-C, too
        if (_read(directory) or {}).get("id") == request["id"]:
            with suppress(OSError):
                (directory / SCALE).unlink()
    if content.get("id") != request["id"]:
        why, fix = "another command has written its own request", "look at the log of the run, and try again"
    elif "answer" not in content:
        why = f"it did not answer within {timeout_s:g} s; it may still be starting"
        fix = "look at its log, and try again; the request is withdrawn, unless the log tells of it"
    elif isinstance(error := content["error"], dict):
        raise RunDirectoryError(f"the run refused: {error['what']}", why=str(error["why"]), fix=str(error["fix"]))
    else:
        return str(content["answer"])
    raise RunDirectoryError(f"the run in {directory} has not answered", why=why, fix=fix)


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


def _write(directory: Path, content: dict[str, Any]) -> None:
    with replacing(directory / SCALE) as file:
        file.write(json.dumps(content).encode())


def _read(directory: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file; an empty one if the content is not one; None if there is no file."""
    try:
        parsed = json.loads(read_file(directory / SCALE, max_nbytes=_MOST_NBYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
