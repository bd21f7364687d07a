"""Where a rollouter's engine gets its weights from: the receivers of a replica, and what a failed transfer means."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from hwrl.errors import CommError, ReceiverExcludedError, TransferFailedError
from hwrl.interfaces import RolloutEngine
from hwrl.lora import is_adapters
from hwrl.weights import POLICY, POLICY_BASE, Received, WeightReceiver

_log = logging.getLogger(__name__)


INCARNATION = "incarnation"
"""The key of a version's metadata that says which incarnation of the trainer published it."""


class WeightUpdater(Protocol):
    """Brings new weights into the engine that it was made for. One thread, the engine's."""

    incarnation: int
    """The incarnation of the trainer that published the engine's weights; -1 before there are any."""

    def poll(self) -> bool:
        """Return whether weights are offered that the engine has not got. Does not block."""
        ...

    def update(self) -> bool:
        """Receive what is offered and load it; return whether the engine has new weights to generate with.

        Blocks until what is offered is whole. If it cannot be had, the engine goes on with what it has.
        """
        ...

    def release(self) -> None:
        """Free device memory: the engine sleeps. What it has dropped may come with the next version."""
        ...

    def request(self) -> None:
        """Ask to be sent now what the engine needs to generate."""
        ...

    def totals(self) -> dict[str, float]:
        """Return the running totals of what came."""
        ...


class RetryingReceiver:
    """A receiver for which a failed transfer is no error: it keeps what it has, and the transfer is tried again.

    A receive waits ``timeout_s`` for a version to become whole.
    """

    def __init__(self, receiver: WeightReceiver, *, timeout_s: float) -> None:
        self.receiver, self._timeout_s = receiver, timeout_s
        self.nbytes = 0
        """What was received so far."""

    def poll(self) -> bool:
        """Return whether a version is offered that was not received."""
        try:
            return self.receiver.poll() is not None
        except ReceiverExcludedError as exc:
            self._join_again(exc)
            return False

    def receive(self) -> Received | None:
        """Return what is offered, None if the transfer failed. Blocks."""
        try:
            received = self.receiver.receive(timeout_s=self._timeout_s)
            self.nbytes += received.nbytes
            return received
        except ReceiverExcludedError as exc:
            self._join_again(exc)
        except (TransferFailedError, CommError) as exc:
            _log.warning("keeping version %s: %s", self.receiver.version, exc)
        return None

    def _join_again(self, exc: ReceiverExcludedError) -> None:
        _log.warning("joining again: %s", exc)
        self.receiver.join()


class ModelUpdater:
    """Brings whole models from one link into ``engine``."""

    def __init__(self, engine: RolloutEngine, link: RetryingReceiver) -> None:
        self._engine, self._link = engine, link
        self.incarnation = -1

    def poll(self) -> bool:
        return self._link.poll()

    def update(self) -> bool:
        received = self._link.receive()
        if received is None or _is_outdated(received, self.incarnation):
            return False
        self._engine.load_weights(received.items(), version=received.version)
        self.incarnation = int(received.metadata[INCARNATION])
        return True

    def release(self) -> None:
        self._link.receiver.release()

    def request(self) -> None:
        self._link.receiver.join()

    def totals(self) -> dict[str, float]:
        return {"received_nbytes": float(self._link.nbytes)}


class Connect(Protocol):
    """Joins the link ``name``; without ``newest`` only later versions come."""

    def __call__(self, name: str, *, newest: bool = True) -> RetryingReceiver: ...


class AdapterUpdater:
    """Brings adapters into ``engine``, and beneath them their base whenever the engine does not hold it.

    ``connect`` joins a link, POLICY or POLICY_BASE. The base's is joined exactly as long as that is missing, which is
    how the sender knows; its memory is freed when the base is in the engine. An adapter that comes before its base is
    kept until then.
    """

    def __init__(self, engine: RolloutEngine, connect: Connect) -> None:
        self._engine, self._connect = engine, connect
        self._base: RetryingReceiver | None = connect(
            POLICY_BASE
        )  # before the other: who has joined that is known to lack this
        self._policy = connect(POLICY)
        self._held: Received | None = None
        self._base_loads = self._base_nbytes = 0
        self.incarnation = -1

    def poll(self) -> bool:
        if self._base is None and self._lacks_base():
            self.request()
        return (self._base is not None and self._base.poll()) or self._policy.poll()

    def update(self) -> bool:
        if self._base is not None and self._base.poll():
            base = self._base.receive()
            if base is None:
                return False
            self._load_base(base, identity=base.version)
            self._base_nbytes += base.nbytes
        elif self._policy.poll():
            adapter = self._policy.receive()
            if adapter is None:
                return False
            if _is_outdated(adapter, self.incarnation):
                self._held = None  # its memory is the next one's
                return False
            self._held = adapter
        loaded = self._load_held()
        if not loaded and self._held is not None:
            self.request()  # its base was lost, or never came, after the sender had decided not to send that
        return loaded

    def release(self) -> None:
        if self._base is None and self._lacks_base():
            self._base = self._connect(POLICY_BASE, newest=False)

    def request(self) -> None:
        if self._base is not None:
            self._base.receiver.join()
        elif self._lacks_base():
            self._base = self._connect(POLICY_BASE)
        self._policy.receiver.join()

    def totals(self) -> dict[str, float]:
        received = self._policy.nbytes + self._base_nbytes
        return {"received_nbytes": float(received), "base_loads": float(self._base_loads)}

    def _lacks_base(self) -> bool:
        """Return whether the engine holds no base, or another than the newest adapter's."""
        wanted = self._engine.base if self._held is None else self._held.metadata["base"]
        return self._engine.base is None or self._engine.base != wanted

    def _load_base(self, weights: Mapping[str, torch.Tensor], *, identity: int) -> None:
        self._engine.load_base(weights.items(), base=identity)
        self._base_loads += 1
        if self._base is not None:
            self._base.receiver.close()
            self._base = None

    def _load_held(self) -> bool:
        """Load the newest adapter, and a base that came with it; False if there is none, or none for this base."""
        held = self._held
        if held is None:
            return False
        base = int(held.metadata["base"])
        beneath = {name: held[name] for name in held if not is_adapters(name)}
        if beneath:
            self._load_base(beneath, identity=base)
        if self._engine.base != base:
            return False
        adapter = {name: held[name] for name in held if name not in beneath}
        self._engine.load_adapter(adapter.items(), version=held.version, base=base)
        self.incarnation = int(held.metadata[INCARNATION])
        return True


def _is_outdated(received: Received, incarnation: int) -> bool:
    """Return whether ``received`` is of an earlier incarnation: a trainer that was replaced had begun to send it."""
    theirs = int(received.metadata[INCARNATION])
    if theirs < incarnation:
        _log.warning("version %d of the trainer's incarnation %d comes too late", received.version, theirs)
    return theirs < incarnation
