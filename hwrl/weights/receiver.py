"""A rollout replica's end of a weight link: :class:`WeightReceiver`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import (
    CommAbortedError,
    CommError,
    ConfigError,
    LayoutMismatchError,
    ReceiverExcludedError,
    TransferFailedError,
)
from hwrl.interfaces import Backend
from hwrl.weights.copy_destination import CopyDestination
from hwrl.weights.destination import (
    RING_NBYTES,
    Destination,
    DestinationFactory,
    DoubleBuffer,
    TensorLoader,
    TensorStream,
)
from hwrl.weights.intake import WeightIntake
from hwrl.weights.layout import WeightLayout
from hwrl.weights.messages import Proposal, VoteKind
from hwrl.weights.registrations import LinkRegistrations
from hwrl.weights.report import StageClock
from hwrl.weights.transport import Cancellation, Transport
from hwrl.weights.transports import TRANSPORTS


class Received(Mapping[str, torch.Tensor]):
    """A complete, verified version: a mapping of names to tensors on this process's device, in the sender's order.

    The tensors are views of the receiver's memory. They stay unchanged until the next ``receive`` returns. The
    ``receive`` after that overwrites them, so copy what must live longer. For a receiver with ``into`` they are the
    caller's tensors, which the next ``receive`` changes. For a receiver with a ``loader`` the mapping is empty.
    """

    def __init__(self, proposal: Proposal, tensors: Mapping[str, torch.Tensor], nbytes: int, clock: StageClock) -> None:
        self.version, self.metadata, self.nbytes = proposal.version, proposal.metadata, nbytes
        self.seconds: Mapping[str, float] = clock.seconds
        """The host's seconds, by stage (:class:`TransferReport`)."""
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

    ``into`` and ``loader`` choose where versions go:

    - With neither, the receiver has memory for two versions. The old one stays valid until the new one is complete.
    - ``into`` maps names to tensors on this process's device, at least those that are sent. Versions are received into
      these tensors.
    - ``loader`` gets each tensor as soon as it has arrived (:class:`TensorStream`).
      :class:`~hwrl.weights.StreamReceiver` yields the tensors instead.

    With ``into`` or ``loader`` the old version is lost when a transfer begins. Then :attr:`version` is None until a
    transfer succeeds, and the tensors must not be used. Buckets that cannot be received directly into their tensors go
    through a ring of at most ``buckets`` buckets and ``ring_nbytes`` bytes, and at least one bucket.

    ``newest=False`` ignores the version that is already proposed and waits for later ones. ``transports`` must have the
    sender's transport. A restarted replica replaces the old one of its name. Use this from one thread; any thread may
    call :meth:`cancel`. A context manager.
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
        buckets: int = 8,
        ring_nbytes: int = RING_NBYTES,
        newest: bool = True,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        backend = backend_or_default(backend)
        self.replica, self.version = replica, None
        self._keeps_old = into is None and loader is None
        self._cancellation = Cancellation()
        make_destination = _destination_factory(into, loader, backend, buckets=buckets, ring_nbytes=ring_nbytes)
        self._registrations = LinkRegistrations(
            store, name=name, replicas=[replica], newest=newest, transports=transports, cancellation=self._cancellation
        )
        self._intake = WeightIntake(
            self._registrations.channel,
            backend=backend,
            make_destination=make_destination,
            buckets=buckets,
            cancellation=self._cancellation,
        )
        self._taking = False  # whether a transfer is under way
        self._undelivered: list[Received] = []  # a committed version that no caller has got, if there is one

    version: int | None
    """The newest version received here, also after :meth:`release`.

    None before the first, and after a failed transfer with ``into`` or ``loader``.
    """

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def join(self) -> None:
        """Join again: after ReceiverExcludedError, or when the weights were lost.

        The host transport's newest version can then be received again. The device and ipc transports send nothing until
        the trainer publishes again; :meth:`WeightSender.new_receivers` tells the trainer of this receiver.
        """
        self._registrations.channel.require_own_process()
        self._intake.abort()
        self._registrations.join()

    def release(self) -> None:
        """Free the memory of received versions, which must not be used after this; the next version allocates it."""
        self._intake.release()

    def poll(self) -> int | None:
        """Return the proposed version if this receiver has not taken the proposal, else None. Never blocks.

        Costs one short store round trip while nothing is new. Raises ReceiverExcludedError within half a second after
        this receiver was excluded.
        """
        self._join_if_left()
        if self._undelivered:
            return self._undelivered[0].version
        proposal = self._registrations.poll()
        return None if proposal is None else proposal.version

    def receive(self, *, timeout_s: float = 60.0) -> Received:
        """Block until the newest proposed version is committed here, and return it.

        If this raises, the sender does not count the version as received here, and :attr:`version` is the one before.

        Raises CommTimeoutError if nothing is proposed within ``timeout_s``, or if a stored version (host transport) is
        not complete by then. With the other transports, a transfer is limited by the sender's ``timeout_s`` instead:
        this receiver waits as long as the sender may wait for others.

        Raises TransferFailedError if the version was not committed, because the sender gave up (at once) or was silent
        beyond its limits. The old version stays valid, except with ``into`` or ``loader``. Raises ReceiverExcludedError
        if this receiver was excluded; it may ``join`` again. Raises CommAbortedError if another thread called
        :meth:`cancel`.
        """
        try:
            if not self._undelivered:
                self._receive(timeout_s)
        except Exception:
            self._cancellation.check()
            raise
        finally:
            self._cancellation.clear()
        return self._undelivered.pop()

    def lose(self) -> None:
        """Count the newest version as not received, because its tensors were dropped. The next call joins again."""
        self.version = None
        with contextlib.suppress(CommError):  # if the store is lost, there is no link to leave
            self._registrations.leave()

    def cancel(self) -> None:
        """Abort the receive of another thread, or the next one if there is none. Does not wait for its end.

        A receive that waits ends within a fifth of a second. One that takes part in a transfer aborts it and leaves the
        link, so the sender repeats the transfer for the others. The next receive or poll joins again.
        """
        self._cancellation.set()
        if self._taking:  # otherwise the connections stay
            self._intake.abort()

    def forget_cancellation(self) -> None:
        """Forget a :meth:`cancel` that came after the receive had ended."""
        self._cancellation.clear()

    def _receive(self, timeout_s: float) -> None:
        deadline, aborted = time.monotonic() + timeout_s, None
        self._join_if_left()
        while True:
            clock = StageClock()
            try:
                with clock("wait"):
                    proposal = self._registrations.wait(
                        deadline=deadline, timeout_s=timeout_s, aborted=aborted, have=self.version
                    )
            except CommAbortedError:
                if aborted is not None:
                    self._registrations.leave()  # the sender need not wait for it in the next attempt
                raise
            try:
                layout, destination, _ = self._intake.prepare(proposal)
                if self._take(proposal, layout, destination, deadline, clock):
                    return
            except LayoutMismatchError:
                self._registrations.leave()  # the sender need not wait for a receiver that cannot receive
                raise
            if not self._registrations.keeps_versions(proposal):
                aborted, deadline = proposal, self._registrations.next_deadline(proposal, deadline)

    def close(self) -> None:
        """Leave the link and free the memory; received tensors must not be used after this. Not in a forked child."""
        self._registrations.channel.require_own_process()
        try:
            with contextlib.suppress(CommError):  # if the store is lost, there is no link to leave
                self._registrations.leave()
        finally:
            self._intake.close()

    def _join_if_left(self) -> None:
        if not self._registrations.numbers:
            self._registrations.join()

    def _take(
        self, proposal: Proposal, layout: WeightLayout, destination: Destination, deadline: float, clock: StageClock
    ) -> bool:
        """Take part in ``proposal``; return whether a version is committed here."""
        (member,) = self._registrations.members_of(proposal)
        assert member is not None, "the proposal is for this receiver"
        after = proposal.number - 1
        try:
            after = self._registrations.begin(proposal)
            if not self._registrations.rendezvous(proposal, clock):
                return False
            if not self._keeps_old:
                self.version = None  # from here on the tensors may hold a mixture
            self._taking = True
            taken = self._intake.take(
                proposal,
                member,
                replica=self.replica,
                after=after if self._keeps_old else 0,
                deadline=deadline,
                clock=clock,
            )
            if taken is not None:
                received = Received(taken, destination.tensors, layout.payload_nbytes, clock)
                self._undelivered, self.version = [received], taken.version
            return taken is not None
        except BaseException as exc:
            if not self._undelivered:
                self._end_part(proposal, member, exc, after=after)
            raise
        finally:
            self._taking = False

    def _end_part(self, proposal: Proposal, member: int, exc: BaseException, *, after: int) -> None:
        """End the part in ``proposal`` after ``exc``, so that the sender does not take this receiver for one with it.

        A stored version can be received again. Otherwise the sender may wait for this receiver, or count its vote, so
        it leaves, unless the sender excludes it for a failure of its own.
        """
        if self._registrations.keeps_versions(proposal):
            if not isinstance(exc, TransferFailedError):
                self._registrations.undo(after)
        elif not isinstance(exc, ReceiverExcludedError):
            with contextlib.suppress(CommError, TransferFailedError):
                vote = self._registrations.channel.vote(proposal, member)
                if vote is None or vote.kind is not VoteKind.FAILED:
                    self._registrations.leave()


def _destination_factory(
    into: Mapping[str, torch.Tensor] | None, loader: TensorLoader | None, backend: Backend, **ring: Any
) -> DestinationFactory:
    """Return a function that makes the destination of a layout's versions."""
    if into is not None and loader is not None:
        raise ConfigError("a receiver has one destination", why="both `into` and `loader` are given", fix="give one")
    if into is not None:
        return functools.partial(CopyDestination.into, targets=into, backend=backend, **ring)
    if loader is not None:
        return functools.partial(TensorStream, loader=loader, backend=backend, **ring)
    return functools.partial(DoubleBuffer, backend=backend)
