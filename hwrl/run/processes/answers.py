"""Answers of actors: results of remote calls that may still be on their way, and the errors in them."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from hwrl.errors import HwrlError, first_line

DEATH_ERRORS = (RayActorError, NodeDiedError, OutOfMemoryError)
"""Ray's errors for a call to a dead process."""
DEATH_NOTICE_S = 5.0
"""How long Ray may need to report a death on this machine. Another process may fail of that death before."""

_LOSSES = {
    "node was terminated": "its machine is lost",
    "node has died": "its machine is lost",
    "low on memory": "its machine had too little memory, and Ray ended it",
}
"""Parts of the texts of Ray's errors, with their meaning."""

ValueT = TypeVar("ValueT")


class Answer(Protocol[ValueT]):
    """The answer to a remote call: a ``ray.ObjectRef`` at run time. The type parameter is for the type checker."""

    def future(self) -> Future[ValueT]:
        """Return a future of the answer."""
        ...


def is_ready(answer: Answer[Any], *, timeout_s: float = 0.0) -> bool:
    """Return whether the answer is there within ``timeout_s``."""
    return bool(ray.wait([answer], timeout=timeout_s)[0])


def value_of(answer: Answer[ValueT]) -> ValueT:
    """Wait for the answer and return its value. An hwrl error in the other process is raised as itself."""
    try:
        value: ValueT = ray.get(answer)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            raise exc.cause from exc
        raise
    return value


def raise_hwrl_error(answer: Answer[Any]) -> None:
    """Raise the hwrl error in a finished call, if it has one."""
    with contextlib.suppress(RayError):  # a death, or an error from outside hwrl
        value_of(answer)


def death_of(answer: Answer[Any]) -> str | None:
    """Return the reason of the death in an answer that is ready; None if its process lives."""
    try:
        ray.get(answer)
    except DEATH_ERRORS as exc:
        return why_died(exc)
    except RayTaskError:
        return None
    return None


def why_ended(answer: Answer[Any]) -> str:
    """Return the reason why a call ended that should have run on."""
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
    """Return the reason in Ray's error for a dead process. Ray adds the loss of a machine, or of memory, last."""
    text = str(death)
    for sign, reason in _LOSSES.items():
        if sign in text:
            return reason
    return first_line(death)
