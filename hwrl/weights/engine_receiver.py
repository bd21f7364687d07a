"""The receiver in one worker of a rollout engine. Another process finds the offers and passes them to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from hwrl.comm import Store, connect_store
from hwrl.errors import CommError, LayoutMismatchError, ReceiverExcludedError, TransferFailedError
from hwrl.interfaces import Backend, WeightOffer
from hwrl.weights.control import ControlChannel
from hwrl.weights.destination import DestinationFactory
from hwrl.weights.intake import WeightIntake
from hwrl.weights.messages import Proposal
from hwrl.weights.report import StageClock
from hwrl.weights.transport import Transport
from hwrl.weights.transports import TRANSPORTS

_log = logging.getLogger("hwrl.weights")


class Taken(NamedTuple):
    """A worker's result of an offer, in plain values for the way to another process.

    ``proposal`` is the number of the proposal whose version is now complete in the worker, with its ``version`` and
    ``epoch``; 0 if there is none, and then ``why`` is the reason. ``fault`` says that the worker failed, not the
    transfer.
    """

    proposal: int = 0
    epoch: int = 0
    version: int = -1
    why: str = ""
    fault: bool = False


class EngineReceiver:
    """Receives offers as receiver ``number`` of an engine, into the destinations that ``make_destination`` makes.

    The engine's process joins the link and finds the offers (:class:`~hwrl.weights.LinkRegistrations`). This object may
    live in another process, on the worker's device. It connects to a link's store at the first offer. ``transports``
    must have the sender's transport. Use it from one thread.
    """

    def __init__(
        self,
        number: int,
        *,
        backend: Backend,
        make_destination: DestinationFactory,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        self._number, self._backend, self._make_destination = number, backend, make_destination
        self._transports = transports
        self._stores: dict[str, Store] = {}
        self._intakes: dict[tuple[str, str], WeightIntake] = {}

    def take(self, offer: WeightOffer) -> Taken:
        """Receive ``offer``. Blocks until the sender has decided about it; ``offer.limit_s`` is for the caller's wait.

        Never raises an Exception, because other workers would wait for this one's result in vain. Call it only if the
        offer has a member for this receiver.
        """
        try:
            taken = self._take(offer)
        except LayoutMismatchError as exc:
            return Taken(why=str(exc), fault=True)
        except (TransferFailedError, ReceiverExcludedError, CommError) as exc:
            return Taken(why=str(exc))
        except Exception as exc:  # noqa: BLE001 - the result has it
            _log.warning("receiver %d failed", self._number, exc_info=True)
            return Taken(why=f"{type(exc).__name__}: {exc}", fault=True)
        if taken is None:
            return Taken(why="the sender did not commit it")
        return Taken(taken.number, taken.epoch, taken.version)

    def release(self, *, keep_plan: bool = False) -> None:
        """Free the destinations; the next offer makes them again.

        With ``keep_plan`` those of copies into tensors that live on are kept, and free their rings only.
        """
        for intake in self._intakes.values():
            intake.release(keep_plan=keep_plan)

    def close(self) -> None:
        """Close all connections and free the destinations."""
        for intake in self._intakes.values():
            intake.close()
        self._intakes.clear()
        self._stores.clear()

    def _take(self, offer: WeightOffer) -> Proposal | None:
        member = offer.members[self._number]
        intake = self._intake_of(offer)
        proposal = intake.channel.proposal(offer.proposal)
        if member is None or proposal is None:
            raise TransferFailedError(
                f"proposal {offer.proposal} cannot be received",
                why="its sender has gone on, or it is not for this receiver",
                fix="take a later offer",
            )
        deadline, replica = time.monotonic() + offer.timeout_s, f"receiver {self._number}"
        try:
            return intake.take(proposal, member, replica=replica, after=0, deadline=deadline, clock=StageClock())
        finally:
            if offer.once:
                self._intakes.pop((offer.store, offer.link)).close()

    def _intake_of(self, offer: WeightOffer) -> WeightIntake:
        key = (offer.store, offer.link)
        if key not in self._intakes:
            store = self._stores.get(offer.store) or connect_store(offer.store)
            self._stores[offer.store] = store
            channel = ControlChannel(store, name=offer.link, transports=self._transports)
            self._intakes[key] = WeightIntake(channel, backend=self._backend, make_destination=self._make_destination)
        return self._intakes[key]
