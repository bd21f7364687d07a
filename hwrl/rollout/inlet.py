"""Where a rollouter's engine gets its weights from: the receivers of a replica, and what a failed transfer means."""

from __future__ import annotations

import logging
from typing import Protocol

from hwrl.errors import CommError, QuarantinedError, TransferFailedError
from hwrl.rollout.engine import RolloutEngine
from hwrl.weights import Received, WeightReceiver

_log = logging.getLogger(__name__)


class WeightsInlet(Protocol):
    """Brings new weights into the engine that it was made for. One thread, the engine's."""

    def poll(self) -> bool:
        """Return whether weights are offered that the engine has not got. Does not block."""
        ...

    def update(self) -> bool:
        """Load what is offered. Blocks until it is whole; False if it could not be had, and the old version goes on."""
        ...


class Link:
    """A receiver for which a failed transfer is no error: it keeps what it has, and the transfer is tried again.

    A receive waits ``patience_s`` for a version to become whole. The link ends the receiver.
    """

    def __init__(self, receiver: WeightReceiver, *, patience_s: float) -> None:
        self._receiver, self._patience_s = receiver, patience_s

    def poll(self) -> bool:
        """Return whether a version is offered that was not received."""
        try:
            return self._receiver.poll() is not None
        except QuarantinedError as exc:
            self._join_again(exc)
            return False

    def receive(self) -> Received | None:
        """Return what is offered, None if the transfer failed. Blocks."""
        try:
            return self._receiver.receive(timeout_s=self._patience_s)
        except QuarantinedError as exc:
            self._join_again(exc)
        except (TransferFailedError, CommError) as exc:
            _log.warning("keeping version %s: %s", self._receiver.version, exc)
        return None

    def _join_again(self, exc: QuarantinedError) -> None:
        _log.warning("joining again: %s", exc)
        self._receiver.join()


class ModelInlet:
    """Brings whole models from one link into ``engine``."""

    def __init__(self, engine: RolloutEngine, link: Link) -> None:
        self._engine, self._link = engine, link

    def poll(self) -> bool:
        return self._link.poll()

    def update(self) -> bool:
        received = self._link.receive()
        if received is None:
            return False
        self._engine.load_weights(received.items(), version=received.version)
        return True
