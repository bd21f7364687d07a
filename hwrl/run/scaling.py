"""A mailbox in the run directory: ``hwrl scale`` writes a request, and the run writes the answer.

Each request has two files of its own. The process that unlinks the request decides: the run takes it, or its sender
withdraws it.

The run itself adds and removes replicas in ``Replicas.scale``. Everybody with write access to the run directory may
scale the run. This module imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hwrl.checkpoint import DurableFS, find_owner
from hwrl.errors import HwrlError, RunDirectoryError
from hwrl.files import read_file
from hwrl.run.config import MOST_PROCESSES, RUN_CONFIG
from hwrl.run.invocation import invoked

_REQUEST, _ANSWER = "scale_request.{}.json", "scale_answer.{}.json"
_DRAFT = ".tmp_scale_{}.json"
_MOST_NBYTES = 1 << 16
_LOOK_S = 0.1


def find_mail(directory: Path) -> list[Path]:
    """Return the requests and answers in ``directory``.

    A run removes those that it finds before it locks the directory. Later ones are for itself, even during its start.
    """
    return [path for name in (_REQUEST, _ANSWER, _DRAFT) for path in _find(directory, name.format("*"))]


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
        """Take the oldest request and return it, or None. Removes invalid ones. Does not block."""
        for path in sorted(_find(self._directory, _REQUEST.format("*")), key=_written_ns):
            content = _read(path)
            try:
                path.unlink()
            except OSError:
                continue  # its sender has just withdrawn it, or it cannot be removed: it must not be taken again
            replicas = None if content is None else content.get("replicas")
            if type(replicas) is int and 0 < replicas <= MOST_PROCESSES:
                prefix, suffix = _REQUEST.split("{}")
                return ScaleRequest(path.name.removeprefix(prefix).removesuffix(suffix), replicas)
        return None

    def carry_out(
        self,
        request: ScaleRequest,
        *,
        scale: Callable[[int], str],
        record: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        """Scale to the requested number, log the outcome that ``scale`` returns, ``record`` the number, and answer.

        If ``scale`` raises an HwrlError, nothing has changed, and it is the answer. If ``record`` raises
        RunDirectoryError, the answer is the outcome with a warning.
        """
        try:
            outcome = scale(request.replicas)
        except HwrlError as error:
            self.answer(request, error=error)
            return
        log(outcome)
        try:
            record(request.replicas)
        except RunDirectoryError as error:
            warning = f"warning: {error.what}: {error.why}; {error.fix}"
            log(warning)
            outcome = f"{outcome}\n{warning}"
        self.answer(request, text=outcome)

    def answer(self, request: ScaleRequest, *, text: str = "", error: HwrlError | None = None) -> None:
        """Write the outcome of ``request`` for its sender. If the write fails, the sender gets no answer."""
        parts = None if error is None else {"what": error.what, "why": error.why, "fix": error.fix}
        with suppress(OSError):
            path = self._directory / _ANSWER.format(request.request_id)
            DurableFS().replace_file(path, _encode({"text": text, "error": parts}))


def request_replicas(directory: Path, replicas: int, *, timeout_s: float = 30.0) -> str:
    """Request ``replicas`` replicas from the run in ``directory``; return its answer. Blocks for up to ``timeout_s``.

    Raises RunDirectoryError if the directory has no run, or the run is not running, does not answer, or refuses.
    """
    _check_runs(directory)
    request_id = uuid.uuid4().hex
    request, answer = (directory / name.format(request_id) for name in (_REQUEST, _ANSWER))
    try:
        DurableFS().replace_file(request, _encode({"replicas": replicas}))
        return _wait_for_answer(request, answer, timeout_s)
    except OSError as exc:
        raise RunDirectoryError(
            f"cannot write a request to the run in {directory}", why=str(exc), fix="run this as the user of the run"
        ) from exc
    finally:  # of Ctrl-C, too
        for path in (request, answer):
            with suppress(OSError):
                path.unlink()


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


def _wait_for_answer(request: Path, answer: Path, timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    while not (content := _read(answer)):
        if time.monotonic() > deadline_s:
            raise _withdraw(request, timeout_s)
        time.sleep(_LOOK_S)
    error = content.get("error")
    if isinstance(error, dict):
        raise RunDirectoryError(
            f"the run refused: {error.get('what')}", why=str(error.get("why")), fix=str(error.get("fix"))
        )
    return str(content.get("text"))


def _withdraw(request: Path, timeout_s: float) -> RunDirectoryError:
    """Withdraw the request unless the run has already taken it; return the error that describes the case."""
    why = f"it did not take the request within {timeout_s:g} s; it may still be starting"
    fix = "look at its log, and try again; the request is withdrawn"
    try:
        request.unlink()
    except FileNotFoundError:
        why = f"it has taken the request, but did not answer within {timeout_s:g} s"
        fix = "look at its log for the outcome"
    return RunDirectoryError(f"the run in {request.parent} has not answered", why=why, fix=fix)


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _find(directory: Path, pattern: str) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory) if fnmatchcase(name, pattern)]
    except OSError:
        return []


def _written_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``; an empty one if the content is not one; None if there is no file."""
    try:
        parsed = json.loads(read_file(path, max_nbytes=_MOST_NBYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
