"""Answers of actors: the results of remote calls, which may not have arrived yet, and the errors in them."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from hwrl.errors import HwrlError, first_line

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

ValueT = TypeVar("ValueT")


class Answer(Protocol[ValueT]):
    """The answer to a remote call: a ``ray.ObjectRef`` at run time. The type parameter is for the type checker."""

    def future(self) -> Future[ValueT]:
        """Return a future of the answer."""
        ...


def is_ready(answer: Answer[Any], *, timeout_s: float = 0.0) -> bool:
    """Return whether the answer has arrived. Waits up to ``timeout_s`` for it."""
    return bool(ray.wait([answer], timeout=timeout_s)[0])


def value_of(answer: Answer[ValueT]) -> ValueT:
    """Wait for the answer and return its value. If the call raised an HwrlError, raise this error itself."""
    try:
        value: ValueT = ray.get(answer)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            raise exc.cause from exc
        raise
    return value


def raise_hwrl_error(answer: Answer[Any]) -> None:
    """Raise the HwrlError of a finished call, if it raised one. Ignore a death and all other errors."""
    with contextlib.suppress(RayError):
        value_of(answer)


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
