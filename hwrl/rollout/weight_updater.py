"""Load received weights into an engine: whole models, or a base and its adapters."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Protocol

import torch

from hwrl.errors import CommError, ReceiverExcludedError, TransferFailedError
from hwrl.interfaces import RolloutEngine
from hwrl.lora import is_adapters
from hwrl.weights import POLICY, POLICY_BASE, Received, WeightReceiver

_log = logging.getLogger(__name__)


INCARNATION = "incarnation"
"""The key, in a version's metadata, of the trainer's incarnation."""


class WeightUpdater(Protocol):
    """Loads new weights into one engine. Only the engine's thread calls it."""

    incarnation: int
    """The trainer's incarnation that published the engine's weights; -1 before the first."""

    def poll(self) -> bool:
        """Return whether new weights are offered. Does not block."""
        ...

    def update(self) -> bool:
        """Receive the offered weights and load them. Return whether the engine now has a new version.

        Blocks until the transfer ends. After a failed transfer the engine keeps its weights.
        """
        ...

    def release(self) -> None:
        """Free device memory, because the engine sleeps. The next version may bring the weights that it dropped."""
        ...

    def request(self) -> None:
        """Request the weights that the engine lacks. Does not wait for them."""
        ...

    def totals(self) -> dict[str, float]:
        """Return running totals of the received weights."""
        ...


class RetryingReceiver:
    """Receives versions on one link. A failed transfer is logged, and the next offer is another try.

    A receive waits at most ``timeout_s`` for a version to be complete. It looks into the store once in ``poll_s``:
    a round trip in each step would slow a fast engine down.
    """

    def __init__(self, receiver: WeightReceiver, *, timeout_s: float, poll_s: float = 0.005) -> None:
        self.receiver, self._timeout_s, self._poll_s = receiver, timeout_s, poll_s
        self._offered, self._polled_s = False, -math.inf
        self.nbytes = 0
        """Received bytes so far."""

    def poll(self) -> bool:
        """Return whether a new version was offered at the last look into the store, at most ``poll_s`` ago."""
        return self._offered if time.monotonic() - self._polled_s < self._poll_s else self.look()

    def look(self) -> bool:
        """Look into the store, and return whether a new version is offered."""
        self._polled_s = time.monotonic()
        try:
            self._offered = self.receiver.poll() is not None
        except ReceiverExcludedError as exc:
            self._join_again(exc)
            self._offered = False
        return self._offered

    def receive(self) -> Received | None:
        """Return the offered version, or None if the transfer failed. Blocks."""
        self._polled_s = -math.inf
        try:
            received = self.receiver.receive(timeout_s=self._timeout_s)
            self.nbytes += received.nbytes
            return received
        except ReceiverExcludedError as exc:
            self._join_again(exc)
        except (TransferFailedError, CommError) as exc:
            _log.warning("keeping version %s, the transfer failed: %s", self.receiver.version, exc)
        return None

    def _join_again(self, exc: ReceiverExcludedError) -> None:
        _log.warning("joining the link again: %s", exc)
        self.receiver.join()


class ModelUpdater:
    """Loads whole models from one link into ``engine``."""

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
    """Joins the link ``name``. Without ``newest`` the receiver gets later versions only."""

    def __call__(self, name: str, *, newest: bool = True) -> RetryingReceiver: ...


class AdapterUpdater:
    """Loads adapters into ``engine``, and their base whenever the engine lacks it.

    ``connect`` joins a link: POLICY for adapters, POLICY_BASE for the base. The link for the base is joined only while
    the engine lacks its base. So the sender knows from its members whether to send the base, and the link's memory is
    free the rest of the time. An adapter that arrives before its base waits for it.
    """

    def __init__(self, engine: RolloutEngine, connect: Connect) -> None:
        self._engine, self._connect = engine, connect
        # First the base's link: the sender takes a member of POLICY alone for one that holds the base.
        self._base_link: RetryingReceiver | None = connect(POLICY_BASE)
        self._policy_link = connect(POLICY)
        self._adapter: Received | None = None  # the newest one; loaded again after its base was loaded again
        self._base_loads = self._base_nbytes = 0
        self.incarnation = -1

    def poll(self) -> bool:
        if self._base_link is None and self._lacks_base():
            self.request()
        return (self._base_link is not None and self._base_link.poll()) or self._policy_link.poll()

    def update(self) -> bool:
        # The base is offered before its adapter. The last poll may have looked for it before both came.
        if self._base_link is not None and self._base_link.look():
            base = self._base_link.receive()
            if base is None:
                return False
            self._load_base(base, identity=base.version)
            self._base_nbytes += base.nbytes
        elif self._policy_link.poll():
            adapter = self._policy_link.receive()
            if adapter is None:
                return False
            if _is_outdated(adapter, self.incarnation):
                self._adapter = None  # the receiver reuses its memory
                return False
            self._adapter = adapter
        loaded = self._load_adapter()
        if not loaded and self._adapter is not None:
            self.request()  # the sender sent the adapter alone, and the engine lacks its base
        return loaded

    def release(self) -> None:
        if self._base_link is None and self._lacks_base():
            self._base_link = self._connect(POLICY_BASE, newest=False)

    def request(self) -> None:
        if self._base_link is not None:
            self._base_link.receiver.join()
        elif self._lacks_base():
            self._base_link = self._connect(POLICY_BASE)
        self._policy_link.receiver.join()

    def totals(self) -> dict[str, float]:
        received = self._policy_link.nbytes + self._base_nbytes
        return {"received_nbytes": float(received), "base_loads": float(self._base_loads)}

    def _lacks_base(self) -> bool:
        """Return whether the engine holds no base, or not the base of the newest adapter."""
        wanted = self._engine.base if self._adapter is None else self._adapter.metadata["base"]
        return self._engine.base is None or self._engine.base != wanted

    def _load_base(self, weights: Mapping[str, torch.Tensor], *, identity: int) -> None:
        self._engine.load_base(weights.items(), base=identity)
        self._base_loads += 1
        if self._base_link is not None:
            self._base_link.receiver.close()
            self._base_link = None

    def _load_adapter(self) -> bool:
        """Load the newest adapter, and its base if both arrived together; return False if that is not possible yet."""
        adapter = self._adapter
        if adapter is None:
            return False
        base = int(adapter.metadata["base"])
        base_weights = {name: adapter[name] for name in adapter if not is_adapters(name)}
        if base_weights:
            self._load_base(base_weights, identity=base)
        if self._engine.base != base:
            return False
        weights = {name: adapter[name] for name in adapter if name not in base_weights}
        self._engine.load_adapter(weights.items(), version=adapter.version, base=base)
        self.incarnation = int(adapter.metadata[INCARNATION])
        return True


def _is_outdated(received: Received, incarnation: int) -> bool:
    """Return whether ``received`` is from an earlier incarnation: a replaced trainer started the transfer."""
    sent_by = int(received.metadata[INCARNATION])
    if sent_by < incarnation:
        _log.warning(
            "dropped version %d of the trainer's incarnation %d: a newer incarnation runs", received.version, sent_by
        )
    return sent_by < incarnation
