"""Bring whole models from a weight link into an engine: through memory of the replica's process, or directly."""

from __future__ import annotations

import logging
import math
import time
from typing import TypeAlias

import torch

from hwrl.comm import Store, store_address
from hwrl.errors import CommError, EngineError, ReceiverExcludedError, TransferFailedError
from hwrl.interfaces import RolloutEngine, WeightOffer
from hwrl.weights import DecisionKind, LinkRegistrations, Proposal, Received, WeightReceiver

_log = logging.getLogger(__name__)

INCARNATION = "incarnation"
"""The key of the trainer's incarnation in a version's metadata."""


class PolledLink:
    """A receiving end of a weight link. It reads the store once per ``poll_s`` at most: reads delay the engine."""

    def __init__(self, end: WeightReceiver | LinkRegistrations, poll_s: float) -> None:
        self._end, self._poll_s = end, poll_s
        self._offered, self._polled_s = False, -math.inf
        self.nbytes = 0
        """Received bytes so far."""
        self.incarnation = -1
        """The trainer's incarnation of the engine's model; -1 until a model with one is loaded."""

    def poll(self) -> bool:
        """Return whether a new version was offered at the last look into the store, at most ``poll_s`` ago."""
        return self._offered if time.monotonic() - self._polled_s < self._poll_s else self.look()

    def look(self) -> bool:
        """Look into the store, and return whether a new version is offered."""
        self._polled_s = time.monotonic()
        try:
            self._offered = self._end.poll() is not None
        except ReceiverExcludedError as exc:
            self._join_again(exc)
            self._offered = False
        return self._offered

    def request(self) -> None:
        """Join the link again, for the newest version and later ones."""
        self._end.join()

    def totals(self) -> dict[str, float]:
        """Return running totals of the received weights."""
        return {"received_nbytes": float(self.nbytes)}

    def _join_again(self, exc: ReceiverExcludedError) -> None:
        _log.warning("joining the link again: %s", exc)
        self.request()


class RetryingReceiver(PolledLink):
    """Receives versions on one link. It logs a failed transfer, and tries again with the next offer.

    A receive waits at most ``timeout_s`` for a complete version. ``poll_s`` is as for :class:`PolledLink`.
    """

    def __init__(self, receiver: WeightReceiver, *, timeout_s: float, poll_s: float = 0.005) -> None:
        super().__init__(receiver, poll_s)
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

    def close(self) -> None:
        """Leave the link, and free its memory."""
        self.receiver.close()


class ReceivedModels(RetryingReceiver):
    """A link of whole models that receives each version into this process, then loads it into the engine.

    The old version serves until the new one is whole. The link has memory for two versions beside the engine's. With
    ``as_base`` these are base models, for an engine with an adapter.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        receiver: WeightReceiver,
        *,
        timeout_s: float,
        as_base: bool = False,
        poll_s: float = 0.005,
    ) -> None:
        super().__init__(receiver, timeout_s=timeout_s, poll_s=poll_s)
        self._engine, self._as_base = engine, as_base

    def update(self) -> bool:
        """Receive the offered version, and load it. Blocks.

        Returns False if the transfer failed, and if the version is dropped because it comes from an earlier incarnation
        than the one before. Raises EngineError if the engine failed.
        """
        received = self.receive()
        if received is None or is_outdated(received, self.incarnation):
            return False
        if self._as_base:
            self._engine.load_base(received.items(), base=received.version)
        else:
            self._engine.load_weights(received.items(), version=received.version)
        self.incarnation = incarnation_of(received, self.incarnation)
        return True

    def release(self) -> None:
        """Free the room for two versions while the engine sleeps."""
        self.receiver.release()


class EngineModels(PolledLink):
    """A link of whole models whose versions go directly into the engine's weights, by the engine's own receivers.

    The engine has no version from the begin of a transfer to its end.

    This process registers the receivers as members of the link ``name``. A single receiver is called ``replica``;
    several are called ``replica``/0, ``replica``/1, and so on. This process finds the offers, and reports the receivers
    ready. The engine generates until the transfer begins. Its receivers connect to the address of ``store``. Without
    ``newest`` the link gets later versions only. With ``once``, for a base model, the receivers leave the link after
    one version. ``timeout_s`` and ``poll_s`` are as for :class:`RetryingReceiver`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        store: Store,
        *,
        name: str,
        replica: str,
        timeout_s: float,
        newest: bool = True,
        once: bool = False,
        poll_s: float = 0.005,
    ) -> None:
        several = [f"{replica}/{number}" for number in range(engine.receivers)]
        self._engine, self._address, self._once = engine, store_address(store), once
        self._timeout_s = timeout_s
        self._members = LinkRegistrations(
            store, name=name, replicas=several if len(several) > 1 else [replica], newest=newest
        )
        super().__init__(self._members, poll_s)
        self._checked = ("", 0)  # the newest layout that fits the engine's model: its hash, its tensors' bytes

    def update(self) -> bool:
        """Let the engine receive the offered version; see :meth:`ReceivedModels.update`."""
        self._polled_s = -math.inf
        try:
            return self._receive()
        except ReceiverExcludedError as exc:
            self._join_again(exc)
        except (TransferFailedError, CommError) as exc:
            _log.warning("the transfer failed, and the engine has version %s: %s", self._engine.version, exc)
        return False

    def release(self) -> None:
        """Do nothing: the engine's receivers free their memory when it sleeps."""

    def close(self) -> None:
        self._members.leave()

    def _receive(self) -> bool:
        """Let the engine take one proposal after another, until one commits or no other follows."""
        deadline, aborted = time.monotonic() + self._timeout_s, None
        while True:
            proposal = self._members.wait(
                deadline=deadline, timeout_s=self._timeout_s, aborted=aborted, have=self._engine.version
            )
            nbytes = self._check(proposal)
            after = self._members.begin(proposal)
            if is_outdated(proposal, self.incarnation):
                return False
            taken = self._take(proposal)
            if taken is not None:
                self.nbytes += nbytes
                self.incarnation = incarnation_of(taken, self.incarnation)
                return True
            if not self._follows(proposal):
                if self._members.keeps_versions(proposal) and time.monotonic() >= deadline:
                    self._members.undo(after)  # the sender still writes it: it stays on offer
                return False
            aborted, deadline = proposal, self._members.next_deadline(proposal, deadline)

    def _check(self, proposal: Proposal) -> int:
        """Return the bytes of the tensors. Raises EngineError if they are another model's; nothing is overwritten."""
        if proposal.layout_hash != self._checked[0]:
            layout = self._members.channel.layout(proposal)
            tensors = {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in layout.entries}
            try:
                self._engine.check_weights(tensors)
            except EngineError:
                self._members.leave()  # so the sender does not wait for a receiver that cannot receive
                raise
            self._checked = layout.hash, layout.payload_nbytes
        return self._checked[1]

    def _take(self, proposal: Proposal) -> Proposal | None:
        """Wait for the transfer, and let the engine take ``proposal``; return what it has then, or None."""
        if not self._members.rendezvous(proposal):
            return None
        try:
            number = self._engine.receive_weights(self._offer(proposal))
        except BaseException:
            self._members.leave()
            raise
        if number == proposal.number:
            return proposal  # not read from the store: the sender may have deleted it
        return None if number is None else self._members.channel.proposal(number)

    def _follows(self, proposal: Proposal) -> bool:
        """Return whether the sender may propose the version again, now that the engine did not get it."""
        if self._members.keeps_versions(proposal):
            return False  # a request brings it again
        decision = self._members.channel.decision(proposal)
        if decision is None:
            return False
        if decision.kind is not DecisionKind.COMMITTED:
            return True
        if None not in self._members.members_of(proposal):
            self.request()  # for the sender, these receivers have the version, so it would not propose it again
        return False

    def _offer(self, proposal: Proposal) -> WeightOffer:
        return WeightOffer(
            store=self._address,
            link=self._members.channel.name,
            proposal=proposal.number,
            version=proposal.version,
            members=self._members.members_of(proposal),
            timeout_s=self._timeout_s,
            limit_s=self._timeout_s + 2 * proposal.limits.decision_s,
            once=self._once,
        )


ModelLink: TypeAlias = ReceivedModels | EngineModels
"""A link of whole models for an engine."""


def is_outdated(offered: Received | Proposal, incarnation: int) -> bool:
    """Return whether a version comes from an earlier incarnation, from a trainer that was replaced. Logs it."""
    sent_by = incarnation_of(offered, incarnation)
    if sent_by < incarnation:
        _log.warning(
            "dropped version %d of the trainer's incarnation %d: a newer incarnation runs", offered.version, sent_by
        )
    return sent_by < incarnation


def incarnation_of(offered: Received | Proposal, unknown: int) -> int:
    """Return the trainer's incarnation that sent a version, ``unknown`` if it does not say."""
    return int(offered.metadata.get(INCARNATION, unknown))
