"""Answers of actors: the results of remote calls, which may not have arrived yet, and the errors in them."""

from __future__ import annotations

import contextlib
import re
import sysconfig
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

import hwrl
from hwrl.errors import DataError, HwrlError, first_line

DEATH_ERRORS = (RayActorError, NodeDiedError, OutOfMemoryError)
"""The errors that Ray raises for a call to a dead process."""
DEATH_NOTICE_S = 5.0
"""How long Ray may take to report a death on this machine. Other processes may fail first, as its consequence."""

_LOSSES = {
    "node was terminated": "its machine was lost",
    "node has died": "its machine was lost",
    "low on memory": "its machine ran out of memory, and Ray killed it",
}
"""Parts of Ray's error texts, each with what it means for the process."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n((?:    .*\n)*)', re.MULTILINE)
_NEXT_ERROR = re.compile(r"^(?:The above exception was|During handling of the above).*$", re.MULTILINE)
_NOT_THE_USERS = (str(Path(hwrl.__file__).parent), sysconfig.get_path("stdlib"), "<frozen", "python/ray/")
"""Beginnings of the paths of code in a traceback that is not the user's; nor is what is in site-packages."""

ValueT = TypeVar("ValueT")


class Answer(Protocol[ValueT]):
    """The answer to a remote call: a ``ray.ObjectRef`` at run time. The type parameter is for the type checker."""

    def future(self) -> Future[ValueT]:
        """Return a future of the answer."""
        ...


def is_ready(answer: Answer[Any], *, timeout_s: float = 0.0) -> bool:
    """Return whether the answer has arrived. Waits up to ``timeout_s`` for it."""
    return bool(ray.wait([answer], timeout=timeout_s)[0])


def value_of(answer: Answer[ValueT], *, process: str = "a process of the run") -> ValueT:
    """Wait for the answer and return its value. If the call raised an HwrlError, raise this error itself.

    Raises DataError for another error if it came from a user's function, else HwrlError, with the lines of the code.
    """
    try:
        value: ValueT = ray.get(answer)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            raise exc.cause from exc
        if isinstance(exc, DEATH_ERRORS):  # of a process that this one has called
            raise
        raise failed_call(str(exc), process) from exc
    return value


def failed_call(text: str, process: str) -> HwrlError:
    """Return the error for a call that failed in ``process`` with an error that is not hwrl's.

    ``text`` is Ray's text of it, a traceback. The error shows its lines from the user's function on; all if there is
    none, because then somebody must find the mistake in hwrl or a library.
    """
    text = f"{_NEXT_ERROR.split(text)[-1].rstrip()}\n"
    frames = list(_FRAME.finditer(text))
    users = [frame for frame in frames if not frame[1].startswith(_NOT_THE_USERS) and "site-packages" not in frame[1]]
    said = text[frames[-1].end() :].strip() if frames else text.strip()
    lines = "".join(frame[0] for frame in frames if not users or frame.start() >= users[0].start())
    why = f"{said}\n{lines}".rstrip()
    if users:
        return DataError(
            f"{users[0][3]} in {users[0][1]} failed in {process}", why=why, fix="correct the code at the lines above"
        )
    return HwrlError(
        f"{process} failed", why=why, fix="if the reason above does not tell what to change, report it with these lines"
    )


def raise_hwrl_error(answer: Answer[Any]) -> None:
    """Raise the HwrlError of a finished call, if it raised one. Ignore a death and all other errors."""
    with contextlib.suppress(RayError):
        try:
            ray.get(answer)
        except RayTaskError as exc:
            if isinstance(exc.cause, HwrlError):
                raise exc.cause from exc


def death_of(answer: Answer[Any]) -> str | None:
    """Return why the process of a finished call died; None if the call returned or raised."""
    try:
        ray.get(answer)
    except DEATH_ERRORS as exc:
        return why_died(exc)
    except RayTaskError:
        return None
    return None


def why_ended(answer: Answer[Any]) -> str:
    """Return why a call ended that was expected to run until the end of the run."""
    try:
        ray.get(answer)
    except DEATH_ERRORS as exc:
        return why_died(exc)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            return f"{exc.cause.what}: {exc.cause.why}"
        return [line for line in str(exc).splitlines() if line.strip()][-1].strip()
    return "it returned"


def why_died(death: Exception) -> str:
    """Return the reason in Ray's error for a death. A lost machine or full memory is named at the end of its text."""
    text = str(death)
    for pattern, reason in _LOSSES.items():
        if pattern in text:
            return reason
    return first_line(death)
