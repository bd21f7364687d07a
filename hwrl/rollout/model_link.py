"""How whole models get from a weight link into an engine: through room for two versions, or straight into it."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from hwrl.comm import Store
from hwrl.errors import CommError, EngineError, ReceiverExcludedError, TransferFailedError
from hwrl.interfaces import RolloutEngine, WeightOffer
from hwrl.weights import DecisionKind, Limits, LinkRegistrations, Proposal, Received, ReceiverTiming, WeightReceiver

_log = logging.getLogger(__name__)

INCARNATION = "incarnation"
"""The key, in a version's metadata, of the trainer's incarnation."""


class Loaded(NamedTuple):
    """A version that is now in the engine, its metadata, and the bytes of its tensors."""

    version: int
    metadata: Mapping[str, str | int | float]
    nbytes: int


class PolledLink(ABC):
    """An end of a weight link that looks into the store once in ``poll_s``: more would slow a fast engine's steps."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
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
            self._offered = self._is_offered()
        except ReceiverExcludedError as exc:
            self._join_again(exc)
            self._offered = False
        return self._offered

    @abstractmethod
    def join(self) -> None:
        """Request versions again, the newest included."""

    @abstractmethod
    def close(self) -> None:
        """Leave the link, and free what is held for it."""

    @abstractmethod
    def _is_offered(self) -> bool:
        """Return whether a new version is offered; raises ReceiverExcludedError."""

    def _join_again(self, exc: ReceiverExcludedError) -> None:
        _log.warning("joining the link again: %s", exc)
        self.join()


class RetryingReceiver(PolledLink):
    """Receives versions on one link. A failed transfer is logged, and the next offer is another try.

    A receive waits at most ``timeout_s`` for a version to be complete. It looks into the store once in ``poll_s``.
    """

    def __init__(self, receiver: WeightReceiver, *, timeout_s: float, poll_s: float = 0.005) -> None:
        super().__init__(poll_s)
        self.receiver, self._timeout_s = receiver, timeout_s

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

    def join(self) -> None:
        self.receiver.join()

    def close(self) -> None:
        self.receiver.close()

    def _is_offered(self) -> bool:
        return self.receiver.poll() is not None


class ModelLink(Protocol):
    """A link of whole models for an engine; of bases, if the engine has an adapter."""

    @property
    def nbytes(self) -> int:
        """Received bytes so far."""

    def poll(self) -> bool:
        """Return whether a new version was offered at the last look into the store."""

    def look(self) -> bool:
        """Look into the store, and return whether a new version is offered."""

    def load(self, *, incarnation: int) -> Loaded | None:
        """Bring the offered version into the engine; None if that failed, or if the version is outdated. Blocks.

        A version of an earlier incarnation than ``incarnation`` is dropped. Raises EngineError if the engine failed.
        """

    def release(self) -> None:
        """Free memory, because the engine sleeps."""

    def join(self) -> None:
        """Request versions again, the newest included."""

    def close(self) -> None:
        """Leave the link, and free what is held for it."""


class ReceivedModels:
    """A model link that receives whole versions, then loads them: the old one serves until the new one is whole.

    It has room for two versions beside the engine.
    """

    def __init__(self, engine: RolloutEngine, link: RetryingReceiver, *, as_base: bool = False) -> None:
        self._engine, self._link, self._as_base = engine, link, as_base
        self.poll, self.look, self.join, self.close = link.poll, link.look, link.join, link.close

    @property
    def nbytes(self) -> int:
        """Received bytes so far."""
        return self._link.nbytes

    def load(self, *, incarnation: int) -> Loaded | None:
        """Receive the offered version, and load it; see :class:`ModelLink`."""
        received = self._link.receive()
        if received is None or is_outdated(received, incarnation):
            return None
        if self._as_base:
            self._engine.load_base(received.items(), base=received.version)
        else:
            self._engine.load_weights(received.items(), version=received.version)
        return Loaded(received.version, received.metadata, received.nbytes)

    def release(self) -> None:
        """Free the room for two versions."""
        self._link.receiver.release()


class EngineModels(PolledLink):
    """A model link that lets the engine's receivers take each version straight into its weights.

    The engine's old version is lost meanwhile.

    This process is the link's member for each receiver, called ``replica`` (``replica``/0, ``replica``/1, ... of
    several). It finds the offers and reports the receivers ready; the engine generates until the transfer begins.
    ``store`` is the store at ``address``. The link is left after one version ``once`` it is a base. ``timeout_s`` and
    ``poll_s`` are as for :class:`RetryingReceiver`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        store: Store,
        *,
        address: str,
        name: str,
        replica: str,
        timeout_s: float,
        newest: bool = True,
        once: bool = False,
        poll_s: float = 0.005,
    ) -> None:
        super().__init__(poll_s)
        several = [f"{replica}/{number}" for number in range(engine.receivers)]
        self._engine, self._address, self._once = engine, address, once
        self._timeout_s, self._timing = timeout_s, ReceiverTiming()
        self._members = LinkRegistrations(
            store, name=name, replicas=several if len(several) > 1 else [replica], newest=newest, timing=self._timing
        )
        self._checked = ("", 0)  # the newest layout that belongs to the engine's model: its hash, its tensors' bytes

    def load(self, *, incarnation: int) -> Loaded | None:
        self._polled_s = -math.inf
        try:
            return self._receive(incarnation)
        except ReceiverExcludedError as exc:
            self._join_again(exc)
        except (TransferFailedError, CommError) as exc:
            _log.warning("the transfer failed, and the engine has version %s: %s", self._engine.version, exc)
        return None

    def release(self) -> None:
        """Do nothing: the engine's receivers free their rings when it sleeps."""

    def join(self) -> None:
        self._members.join()

    def close(self) -> None:
        self._members.leave()

    def _is_offered(self) -> bool:
        return self._members.poll() is not None

    def _receive(self, incarnation: int) -> Loaded | None:
        """Take proposals until one commits, or none follows."""
        deadline, aborted = time.monotonic() + self._timeout_s, None
        while True:
            proposal = self._members.wait(
                deadline=deadline, timeout_s=self._timeout_s, aborted=aborted, have=self._engine.version
            )
            nbytes = self._check(proposal)
            after = self._members.begin(proposal)
            if is_outdated(proposal, incarnation):
                return None
            taken = self._take(proposal)
            if taken is not None:
                self.nbytes += nbytes
                return Loaded(taken.version, taken.metadata, nbytes)
            if not self._follows(proposal):
                if self._members.keeps_versions(proposal) and time.monotonic() >= deadline:
                    self._members.undo(after)  # it is still being written
                return None
            aborted, deadline = proposal, self._members.next_deadline(proposal, deadline)

    def _check(self, proposal: Proposal) -> int:
        """Return the tensors' bytes; EngineError if they are another model's. Nothing is overwritten then."""
        if proposal.layout_hash != self._checked[0]:
            layout = self._members.channel.layout(proposal)
            tensors = {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in layout.entries}
            try:
                self._engine.check_weights(tensors)
            except EngineError:
                self._members.leave()  # the sender need not wait for a receiver that cannot receive
                raise
            self._checked = layout.hash, layout.payload_nbytes
        return self._checked[1]

    def _take(self, proposal: Proposal) -> Proposal | None:
        """Let the engine take ``proposal`` when its transfer begins; return the proposal that the engine now has."""
        if not self._members.rendezvous(proposal):
            return None
        try:
            number = self._engine.receive_weights(self._offer(proposal))
        except BaseException:
            self._members.leave()
            raise
        if number == proposal.number:
            return proposal  # not read again: a sender that stores versions may have forgotten it
        return None if number is None else self._members.channel.proposal(number)

    def _follows(self, proposal: Proposal) -> bool:
        """Return whether the sender may propose the version again, after the engine did not get it."""
        if self._members.keeps_versions(proposal):
            return False  # a request brings it again
        decision = self._members.channel.decision(proposal)
        if decision is None:
            return False
        if decision.kind is not DecisionKind.COMMITTED:
            return True
        if None not in self._members.members_of(proposal):
            self.join()  # the sender takes the other receivers for ones that have it
        return False

    def _offer(self, proposal: Proposal) -> WeightOffer:
        limits = Limits(proposal.timeout_s, self._timing.slack_s)
        return WeightOffer(
            store=self._address,
            link=self._members.channel.name,
            proposal=proposal.number,
            version=proposal.version,
            members=self._members.members_of(proposal),
            timeout_s=self._timeout_s,
            limit_s=self._timeout_s + 2 * limits.decision_s,
            once=self._once,
        )


def is_outdated(offered: Received | Proposal, incarnation: int) -> bool:
    """Return whether a version is from an earlier incarnation: a replaced trainer started the transfer."""
    sent_by = int(offered.metadata.get(INCARNATION, incarnation))
    if sent_by < incarnation:
        _log.warning(
            "dropped version %d of the trainer's incarnation %d: a newer incarnation runs", offered.version, sent_by
        )
    return sent_by < incarnation
