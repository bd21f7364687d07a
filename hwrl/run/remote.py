"""Calls between the processes of a run: actors, the one proxy with which others call them, and the answers.

A method is written once, in the class that does the work: :class:`~hwrl.run.trainer.TrainerRank`,
:class:`~hwrl.run.replica.Replica` or :class:`~hwrl.run.ledger.LedgerActor`. This module does not import torch: a
process first chooses the driver's backend, and its arguments are unpickled before that.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import socket
import sysconfig
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

import hwrl
from hwrl.discovery import get_backend, set_backend
from hwrl.errors import DataError, HwrlError, first_line
from hwrl.lazy import large_imports
from hwrl.run.cluster.placement import (
    DeviceReport,
    ProcessDevices,
    check_devices,
    has_devices,
    make_device_report,
    make_visible,
)
from hwrl.run.config import Config
from hwrl.run.identity import Role, RunInputs

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

_HEARTBEAT_GROUP = "heartbeat"
"""A concurrency group of Ray with its own thread: an actor answers ``ping`` while another call runs."""
_MOST_WARNINGS, _MOST_CHARACTERS = 100, 500
_warnings: deque[str] = deque(maxlen=_MOST_WARNINGS)

ValueT = TypeVar("ValueT")
OtherT = TypeVar("OtherT")
ServedT = TypeVar("ServedT")
ParametersT = ParamSpec("ParametersT")


# -- calls and answers ------------------------------------------------------------------------------------------------


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


def why_ended(answer: Answer[Any]) -> str:
    """Return why a call ended that was expected to run until the end of the run."""
    try:
        value_of(answer)
    except DEATH_ERRORS as exc:
        return why_died(exc)
    except HwrlError as exc:
        return f"{exc.what}: {exc.why.splitlines()[0]}"
    return "it returned"


def why_died(death: Exception) -> str:
    """Return the reason in Ray's error for a death. A lost machine or full memory is named at the end of its text."""
    text = str(death)
    for pattern, reason in _LOSSES.items():
        if pattern in text:
            return reason
    return first_line(death)


# -- the proxy --------------------------------------------------------------------------------------------------------


class Remote(Generic[ServedT]):
    """The proxy of an actor, for every other process; creating it starts the actor's process.

    ``remote.call(TheClass.method, ...)`` sends a call and returns its :class:`Answer` at once. An answer may be an
    argument of another call: Ray then moves the value between the processes without the driver. ``options`` are Ray's
    options for the actor.
    """

    def __init__(self, actor_class: type, *arguments: Any, **options: Any) -> None:
        remote_class = ray.remote(concurrency_groups={_HEARTBEAT_GROUP: 1})(actor_class)
        self._actor: Any = remote_class.options(**options).remote(*arguments)

    @overload
    def call(
        self,
        method: Callable[Concatenate[ServedT, ParametersT], Coroutine[Any, Any, ValueT]],
        *arguments: ParametersT.args,
        **keywords: ParametersT.kwargs,
    ) -> Answer[ValueT]: ...

    @overload
    def call(
        self,
        method: Callable[Concatenate[ServedT, ParametersT], ValueT],
        *arguments: ParametersT.args,
        **keywords: ParametersT.kwargs,
    ) -> Answer[ValueT]: ...

    def call(self, method: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call ``method`` of the class that the actor serves."""
        return self.send(method.__name__, *arguments, **keywords)

    def call_for_two(
        self,
        method: Callable[Concatenate[ServedT, ParametersT], Coroutine[Any, Any, tuple[ValueT, OtherT]]],
        *arguments: ParametersT.args,
        **keywords: ParametersT.kwargs,
    ) -> tuple[Answer[ValueT], Answer[OtherT]]:
        """Call a method that returns two values; return an answer for each, so that one may pass by unread."""
        first, second = self.send(method.__name__, *arguments, returns=2, **keywords)
        return first, second

    def send(self, method: str, *arguments: Any, returns: int = 1, **keywords: Any) -> Any:
        """Call the method with this name."""
        return self._actor.call.options(num_returns=returns).remote(method, *arguments, **keywords)

    def set_up(self, setup: ProcessSetup, **arguments: Any) -> Answer[DeviceReport | None]:
        """Build the part of the run that a :class:`DeviceActor` serves."""
        answer: Answer[DeviceReport | None] = self._actor.set_up.remote(setup, **arguments)
        return answer

    def ping(self) -> Answer[HeartbeatReply]:
        """Send a heartbeat."""
        answer: Answer[HeartbeatReply] = self._actor.ping.options(concurrency_group=_HEARTBEAT_GROUP).remote()
        return answer

    def pid(self) -> Answer[int]:
        """Return the process id of the actor on its machine."""
        answer: Answer[int] = self._actor.__ray_call__.remote(_pid)
        return answer

    def kill(self) -> None:
        """Kill the process. If it is frozen, Ray takes a few seconds."""
        ray.kill(self._actor)


def _pid(actor: object) -> int:
    return os.getpid()


# -- the actors with devices ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeartbeatReply:
    """The answer to a heartbeat.

    It has the process's machine, the seconds that its loop has spent in the current turn, whether it is saving a
    checkpoint in the background, and the warnings that it has logged since the last answer.
    """

    host: str
    turn_s: float = 0.0
    is_saving: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessSetup:
    """What each trainer rank and each replica needs to start."""

    config: Config
    inputs: RunInputs
    backend: str
    devices: ProcessDevices
    store_address: str = field(repr=False)  # it contains the store's secret key
    lock: bytes | None = None
    """The content of the lock file in the run directory. A trainer changes nothing there without it."""


class DeviceActor:
    """An actor with devices: it builds one part of the run, a plain object, and calls this object's methods.

    The subclass names the object's class by its path, because it may import torch. The class has a table ``ALLOCATES``:
    what its methods allocate, by name, for errors about memory; ``__init__`` is the building.
    """

    part: ClassVar[str]
    role: ClassVar[Role]

    def __init__(self) -> None:
        # Ray's handler of SIGTERM ends only the main thread, in which Ray runs this. A loop in another thread would
        # continue, but the actor would no longer answer calls. Remove this when Ray ends such actors.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        keep_warnings()
        self._part: Any = None

    def ping(self) -> HeartbeatReply:
        """Answer a heartbeat, in a thread of its own. An actor that hangs in another call still answers."""
        turn_s, is_saving = getattr(self._part, "turn_s", 0.0), getattr(self._part, "is_saving", False)
        return HeartbeatReply(socket.gethostname(), turn_s, is_saving, take_warnings())

    def set_up(self, setup: ProcessSetup, **arguments: Any) -> DeviceReport | None:
        """Build the part of the run; return the devices that it really uses.

        This is not done in ``__init__``, because Ray reports errors of an actor's ``__init__`` poorly.
        """
        with large_imports():
            devices = _use_devices(setup, role=self.role)
            importlib.import_module("hwrl.run.build")  # transformers, too
            module, _, name = self.part.rpartition(".")
            kind = getattr(importlib.import_module(module), name)
        with setup.inputs.unchanged(self.role), get_backend().allocating(kind.ALLOCATES["__init__"]):
            self._part = kind(setup, **arguments)
        return make_device_report(devices, get_backend()) if has_devices(get_backend()) else None

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the part. A SystemExit of users' code becomes an error: Ray would end the process."""
        assert self._part is not None, "set_up comes first"
        what = self._part.ALLOCATES.get(method)
        try:
            with contextlib.nullcontext() if what is None else get_backend().allocating(what):
                return getattr(self._part, method)(*arguments, **keywords)
        except SystemExit as exc:
            raise RuntimeError(f"it raised {exc!r}").with_traceback(exc.__traceback__) from None


class TrainActor(DeviceActor):
    """The process of a trainer rank."""

    part, role = "hwrl.run.trainer.TrainerRank", "trainer"


class RolloutActor(DeviceActor):
    """The process of a replica. A call of ``run`` occupies a thread until the replica leaves or stops."""

    part, role = "hwrl.run.replica.Replica", "rollout"


def _use_devices(setup: ProcessSetup, *, role: Role) -> tuple[int, ...]:
    """Choose the driver's backend and make this process use its devices; return their indices in this process."""
    set_backend(setup.backend)
    own = make_visible(setup.devices, get_backend().devices, os.environ)  # before vendors' libraries read the variable
    import torch

    check_devices(setup.devices, own, get_backend(), os.environ)
    torch.set_num_threads((setup.config.train if role == "trainer" else setup.config.rollout).threads)
    get_backend().set_device(own[0])
    return own


# -- warnings of a process --------------------------------------------------------------------------------------------


def keep_warnings() -> None:
    """Keep the warnings that this process logs from now on, also those of libraries that print them themselves."""
    make = logging.getLogRecordFactory()

    def keep(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        if record.levelno >= logging.WARNING:
            try:
                text = record.getMessage()
            except Exception:  # noqa: BLE001 - the arguments may not fit the text, or their repr may raise
                text = str(record.msg)
            _warnings.append(f"{record.name}: {' '.join(text.split())}"[:_MOST_CHARACTERS])
        return record

    logging.setLogRecordFactory(keep)


def take_warnings() -> tuple[str, ...]:
    """Return the kept warnings, at most the last 100, and keep them no longer. Any thread may call it."""
    return tuple(_warnings.popleft() for _ in range(len(_warnings)))
