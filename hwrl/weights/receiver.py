"""A rollout replica's end of a weight link: :class:`WeightReceiver`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommTimeoutError, ConfigError, LayoutMismatchError
from hwrl.interfaces import Backend
from hwrl.weights.control import Proposal
from hwrl.weights.copy_destination import CopyDestination
from hwrl.weights.destination import (
    RING_NBYTES,
    Destination,
    DestinationFactory,
    DoubleBuffer,
    TensorLoader,
    TensorStream,
    ring_slots,
)
from hwrl.weights.intake import WeightIntake
from hwrl.weights.layout import WeightLayout
from hwrl.weights.registrations import LinkRegistrations
from hwrl.weights.report import StageClock
from hwrl.weights.transport import Cancellation, ReceiverTiming, Transport
from hwrl.weights.transports import TRANSPORTS

_TIMING = ReceiverTiming()


class Received(Mapping[str, torch.Tensor]):
    """A whole, verified version: names → tensors on this process's device, in the sender's order.

    The tensors are the receiver's memory. They stay unchanged until the next ``receive`` returns; the ``receive``
    after that overwrites them, so copy what must live longer. Received ``into`` given tensors, they are those tensors,
    and the next ``receive`` changes them. Given to a ``loader``, there are none here.
    """

    def __init__(self, proposal: Proposal, tensors: Mapping[str, torch.Tensor], nbytes: int, clock: StageClock) -> None:
        self.version, self.metadata, self.nbytes = proposal.version, proposal.metadata, nbytes
        self.seconds: Mapping[str, float] = clock.seconds
        """The host's seconds, by stage."""
        self.transfer_s = clock.span_s()
        """The seconds between the first and the last byte, measured on the device."""
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class WeightReceiver:
    """A rollout replica's end of the link ``name``. It joins when it is made, and uses the sender's transport.

    Without ``into`` it holds memory for two versions: the old one serves until the new one is whole. With ``into``
    (names → tensors on this process's device, at least those that are sent) versions are received into these tensors.
    Tensors that are laid out differently from the slabs go through a ring of at most ``slabs`` slabs and
    ``ring_nbytes`` bytes. The old version is then lost when a transfer begins: :attr:`version` is None, and the tensors
    must not be used, until a transfer succeeds. With ``loader`` it gets each tensor as it comes
    (:class:`TensorStream`), through the same ring, and the old version is lost, too;
    :class:`~hwrl.weights.StreamReceiver` yields the tensors instead.

    ``newest=False`` ignores the version that is already proposed and waits for later ones. Use it from one thread, but
    for :meth:`cancel`. A restarted replica replaces its namesake. A context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        replica: str,
        backend: Backend | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        loader: TensorLoader | None = None,
        slabs: int = 8,
        ring_nbytes: int = RING_NBYTES,
        newest: bool = True,
        timing: ReceiverTiming = _TIMING,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        backend = backend_or_default(backend)
        self.replica, self.version = replica, None
        self._keeps_old = into is None and loader is None
        self._cancellation = Cancellation()
        make_destination = _destination_factory(into, loader, backend, slabs=slabs, ring_nbytes=ring_nbytes)
        waiting: dict[str, Any] = {"timing": timing, "transports": transports, "cancellation": self._cancellation}
        self._intake = WeightIntake(
            store, name=name, backend=backend, make_destination=make_destination, slabs=slabs, **waiting
        )
        self._members = LinkRegistrations(store, name=name, replicas=[replica], newest=newest, **waiting)
        self._taking = False  # in a transfer
        self._took_part = False  # in a proposal, during this receive
        self._left = False  # the link, after a receive that was cancelled or had no place for a tensor

    version: int | None
    """The version that is whole here; None before the first, and after a failed transfer ``into`` tensors."""

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def join(self) -> None:
        """Request versions again, the newest included: after ReceiverExcludedError, or when the weights were lost."""
        self._intake.abort()
        self._members.join()
        self._left = False

    def release(self) -> None:
        """Free the memory of the received versions, which must not be used later; the next version allocates anew."""
        self._intake.release()

    def poll(self) -> int | None:
        """Return the proposed version if this receiver lacks it, or None; never blocks.

        Costs one short store round trip while nothing is new. Raises ReceiverExcludedError if this receiver was
        excluded; if nothing is new, half a second after that at most.
        """
        self._join_if_left()
        proposal = self._members.poll()
        return None if proposal is None else proposal.version

    def receive(self, *, timeout_s: float = 60.0) -> Received:
        """Block until the newest proposed version is committed here, and return it.

        Raises CommTimeoutError if nothing is proposed within ``timeout_s``, or if a stored version (host transport) is
        not whole by then. For the other transports the limits follow from the sender's ``timeout_s``: this receiver
        waits as long as the sender may wait for others. Raises TransferFailedError if the version did not commit:
        the sender gave up, which is known at once, or is silent beyond its limits. The old version stays valid, unless
        it was received ``into`` tensors. Raises ReceiverExcludedError if this receiver was excluded; ``join`` again.
        Raises CommAbortedError if another thread called :meth:`cancel`.
        """
        self._took_part = False
        try:
            return self._receive(timeout_s)
        except Exception:
            if self._cancellation.is_requested:
                if self._took_part:
                    self._leave()  # the sender need not wait for a receiver that went away
                self._cancellation.check()
            raise
        finally:
            self._cancellation.reset()

    def cancel(self) -> None:
        """End the receive that another thread is in, or else the next one; does not wait for that.

        A receive that waits ends within a fifth of a second. One that takes part in a transfer breaks it off and leaves
        the link, so the sender repeats it for the others; the next receive or poll joins again.
        """
        self._cancellation.request()
        if self._taking:  # else the connections are in order
            self._intake.abort()

    def forget_cancellation(self) -> None:
        """Forget a :meth:`cancel` that came when the receive had ended."""
        self._cancellation.reset()

    def _receive(self, timeout_s: float) -> Received:
        deadline, aborted = time.monotonic() + timeout_s, None
        self._join_if_left()
        while True:
            clock = StageClock()
            with clock("wait"):
                proposal = self._members.wait(
                    deadline=deadline, timeout_s=timeout_s, aborted=aborted, have=self.version
                )
            try:
                destination = self._intake.prepare(proposal)
                self._took_part = True
                taken = self._take(proposal, deadline, clock)
            except LayoutMismatchError:
                self._leave()  # the sender need not wait for a receiver that cannot receive
                raise
            if taken is not None:
                self.version = taken.version
                return Received(taken, destination.tensors, destination.nbytes, clock)
            if not self._members.keeps_versions(proposal):
                aborted, deadline = proposal, self._members.next_deadline(proposal, deadline)

    def close(self) -> None:
        """Leave the link and free the memory; received tensors must not be used later."""
        self._members.leave()
        self._intake.close()

    def _leave(self) -> None:
        self._members.leave()
        self._left = True

    def _join_if_left(self) -> None:
        if self._left:
            self._members.join()
            self._left = False

    def _take(self, proposal: Proposal, deadline: float, clock: StageClock) -> Proposal | None:
        after = self._members.begin(proposal)
        (member,) = self._members.members_of(proposal)
        assert member is not None, "the proposal is for this receiver"
        if not self._members.rendezvous(proposal, clock):
            return None
        if not self._keeps_old:
            self.version = None  # from here on the tensors may hold a mixture
        self._taking = True
        try:
            return self._intake.take(
                proposal,
                member,
                replica=self.replica,
                after=after if self._keeps_old else 0,
                deadline=deadline,
                clock=clock,
            )
        except CommTimeoutError:
            self._members.undo(after)  # it is still being written
            raise
        finally:
            self._taking = False


def _destination_factory(
    into: Mapping[str, torch.Tensor] | None,
    loader: TensorLoader | None,
    backend: Backend,
    *,
    slabs: int,
    ring_nbytes: int,
) -> DestinationFactory:
    """Return the maker of a layout's destination."""
    if into is not None and loader is not None:
        raise ConfigError("a receiver has one place", why="`into` and `loader` were given", fix="give one of them")

    def make_destination(layout: WeightLayout) -> Destination:
        if into is not None:
            return CopyDestination.into(layout, into, backend=backend, slabs=slabs, ring_nbytes=ring_nbytes)
        if loader is not None:
            largest = max((slab.nbytes for slab in layout.slabs), default=0)
            slots = ring_slots(largest, slabs=slabs, ring_nbytes=ring_nbytes)
            return TensorStream(layout, loader, backend=backend, slots=slots)
        return DoubleBuffer(layout, backend=backend)

    return make_destination
