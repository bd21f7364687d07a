"""A rollout replica's end of a weight link: :class:`WeightReceiver`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError, CommTimeoutError, LayoutMismatchError, ReceiverExcludedError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import InPlace, Place, Staging
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.rounds import note_timeout_s
from hwrl.weights.transports.device import DeviceReceiver
from hwrl.weights.transports.host import HostReceiver
from hwrl.weights.transports.ipc import IpcReceiver

_WATCH_S = 0.2


class Received(Mapping[str, torch.Tensor]):
    """A whole, verified version: names → tensors on this process's device, in the sender's order.

    The tensors are the receiver's memory. They stay valid and unchanged until the next ``receive`` returns, and after
    that until the one after it begins to write: copy what must live longer. Received ``into`` given tensors, they are
    those, which the next ``receive`` changes.
    """

    def __init__(self, offer: Offer, tensors: Mapping[str, torch.Tensor], nbytes: int, clock: StageClock) -> None:
        self.version, self.metadata, self.nbytes = offer.version, offer.metadata, nbytes
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
    """A rollout replica's end of the link ``name``; joins when made, and uses whichever transport the sender offers.

    Without ``into`` it holds room for two versions, so that the old one serves until the new one is whole. With
    ``into`` (names → tensors on this process's device, at least those that are sent) each version is received into
    those very tensors; besides them a ring of ``slabs`` slabs is held, for small tensors only. The old version is
    gone then as soon as a transfer begins: :attr:`version` is None, and the tensors must not be used, until one has
    succeeded.

    Without ``newest`` what is offered when it is made is passed over, and only later versions come. One thread. A
    restarted replica takes its namesake's place. A context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        replica: str,
        backend: Backend | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        slabs: int = 4,
        newest: bool = True,
    ) -> None:
        self._backend = backend_or_default(backend)
        self._board = Board(store, name=name)
        self.replica = replica
        self.version: int | None = None
        """The version that is whole here; None before the first, and after a failed transfer ``into`` tensors."""
        self._done: int  # offers up to this number are taken, withdrawn, failed or passed over
        self._into, self._slabs = into, slabs
        self._rooms: _Rooms | None = None
        self._device = DeviceReceiver(self._board, backend=self._backend, slabs=slabs)
        self._ipc = IpcReceiver(backend=self._backend)
        self._host = HostReceiver(self._board, backend=self._backend)
        self._join(newest=newest)

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def join(self) -> None:
        """Ask to be sent versions, the newest included: after ReceiverExcludedError, or when what came is lost."""
        self._device.close()
        self._board.leave(self._member)
        self._join(newest=True)

    def _join(self, *, newest: bool) -> None:
        self._done = 0 if newest else self._board.newest()  # no later offer is passed over: they may be to this one
        self._member = self._board.join(self.replica)

    def release(self) -> None:
        """Free the memory of what was received, which must not be used any more; the next version allocates it anew."""
        self._rooms = None
        self._backend.empty_cache()

    def poll(self) -> int | None:
        """Return the version that is offered and that this receiver has not got, or None; never blocks.

        Costs two short store round trips. Raises ReceiverExcludedError if this receiver was excluded.
        """
        self._check_standing()
        offer = self._offered(self._board.newest())
        return None if offer is None else offer.version

    def receive(self, *, timeout_s: float = 60.0) -> Received:
        """Block until the newest offered version is committed here, and return it.

        ``timeout_s`` is for the offer, and with the host transport for the whole version: CommTimeoutError. Once a
        version of another transport is offered, the limits are derived from the sender's ``timeout_s``, so that this
        receiver waits as long as the sender may wait for others. Raises TransferFailedError if the version did not
        commit: the sender gave up, which is known at once, or says nothing within its limits (the old version stays
        valid, unless it was received ``into`` tensors); ReceiverExcludedError if this receiver was excluded (``join``
        again).
        """
        deadline, lost = time.monotonic() + timeout_s, None
        while True:
            clock = StageClock()
            with clock("wait"):
                offer = self._await_offer(deadline, timeout_s, lost)
            rooms = self._rooms_for(offer)
            after, self._done = self._done, offer.number
            try:
                taken = self._take(offer, rooms, after, deadline, clock)
            except CommTimeoutError:
                self._done = after  # it is still being written
                raise
            if taken is not None:
                tensors = rooms.flip()
                self.version = taken.version
                return Received(taken, tensors, rooms.layout.payload_nbytes, clock)
            if offer.transport != "host":  # the sender may be as slow with the next round
                lost = offer
                deadline = max(deadline, time.monotonic() + note_timeout_s(offer.timeout_s, note="go"))

    def close(self) -> None:
        """Leave the link and free the memory; tensors that were received must not be used after."""
        self._board.leave(self._member)
        self._device.close()
        self._host.close()
        self.release()

    def _offered(self, newest: int) -> Offer | None:
        if newest <= self._done:
            return None
        offer = self._board.offer(newest)
        if offer is None or offer.transport == "host":
            return offer
        return offer if self._member in offer.to and offer.epoch == self._board.epoch() else None

    def _await_offer(self, deadline: float, timeout_s: float, lost: Offer | None) -> Offer:
        """Wait for an offer, after ``lost`` did not commit; raises at once if the sender gave up after that one."""
        while True:
            self._check_standing()
            newest = self._board.newest()
            offer = self._offered(newest)
            if offer is not None:
                return offer
            why = None if lost is None else self._board.given_up(lost)
            if why is not None:
                raise TransferFailedError(
                    f"the sender gave version {lost.version if lost else '?'} up",
                    why=why,
                    fix="look at the sender's log; this receiver goes on with the version that it has",
                )
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CommTimeoutError(
                    f"no new version of {self._board.name!r} was offered to {self.replica!r} within {timeout_s:g} s",
                    why=f"the newest that it has is {self.version}",
                    fix="is the sender alive? poll() tells without waiting whether there is one",
                )
            self._board.await_offer(newest + 1, timeout_s=min(_WATCH_S, left_s))

    def _take(self, offer: Offer, rooms: _Rooms, after: int, deadline: float, clock: StageClock) -> Offer | None:
        """Receive ``offer``; return the offer that was committed here, or None if none was."""
        if offer.transport == "host":
            place, sums = self._spare(rooms), rooms.sums
            return self._host.receive(offer, rooms.layout, place, sums, after=after, deadline=deadline, clock=clock)
        self._board.say(offer, self._member, note="here", text="here")
        with clock("rendezvous"):
            if self._await_note(offer, "go") != b"go":
                return None
        with clock("wire"), torch.no_grad():
            vote = self._move(offer, rooms, clock)
        with clock("vote"):
            self._board.say(offer, self._member, note="vote", text=vote)
            return offer if self._await_note(offer, "verdict") == b"committed" else None

    def _move(self, offer: Offer, rooms: _Rooms, clock: StageClock) -> str:
        """Receive ``offer``; return the vote: "whole", "corrupt …" or "torn …"."""
        try:
            place = self._spare(rooms)
            if offer.transport == "ipc":
                await_note, say = partial(self._note, offer), partial(self._taken, offer)
                theirs = self._ipc.receive(await_note, say, place, rooms.sums, clock)
            else:
                theirs = self._device.receive(offer, self._member, place, rooms.sums, clock)
            return rooms.sums.vote(theirs)
        except CommError as exc:
            return f"torn: {exc.what}"
        except BaseException as exc:  # the others need not wait for the vote of one that failed
            self._board.say(offer, self._member, note="vote", text=f"torn: {type(exc).__name__}")
            raise

    def _spare(self, rooms: _Rooms) -> Place:
        if self._into is not None:
            self.version = None  # whatever happens now, the old version is no longer whole
        return rooms.spare()

    def _taken(self, offer: Offer, note: str) -> None:
        self._board.say(offer, self._member, note=note, text="taken")

    def _note(self, offer: Offer, note: str) -> bytes:
        """Wait for a note without which there is no transfer."""
        found = self._await_note(offer, note)
        if found is None:
            raise CommError(
                "the sender gave up",
                why=f"its {note!r} of version {offer.version} did not come, and the verdict did",
                fix="look at the sender; this receiver goes on with the version that it has",
            )
        return found

    def _await_note(self, offer: Offer, note: str) -> bytes | None:
        """Wait for the sender's note on ``offer``; None if the verdict, or another offer or sender, came instead."""
        limit_s = note_timeout_s(offer.timeout_s, note=note)
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            found = self._board.await_note(offer, note, timeout_s=min(_WATCH_S, max(0.0, left_s)))
            self._check_standing()
            if found is not None:
                return found
            if self._is_over(offer) or (note != "verdict" and self._board.has_verdict(offer)):
                return self._board.await_note(offer, note, timeout_s=0.0)  # it may have come before those
            if left_s <= 0:
                raise TransferFailedError(
                    f"version {offer.version} did not commit in {self.replica!r}",
                    why=f"the sender's {note!r} did not come within {limit_s:g} s, and it waits for others "
                    f"{offer.timeout_s:g} s at a time",
                    fix="is the sender alive? this receiver goes on with the version that it has",
                )

    def _is_over(self, offer: Offer) -> bool:
        """Return whether another offer was made, or another sender has taken over."""
        return self._board.newest() != offer.number or self._board.epoch() != offer.epoch

    def _check_standing(self) -> None:
        why = self._board.excluded(self._member)
        if why is not None:
            raise ReceiverExcludedError(
                f"receiver {self.replica!r} was excluded from {self._board.name!r}",
                why=why,
                fix="call join() to be sent the next version",
            )

    def _rooms_for(self, offer: Offer) -> _Rooms:
        if self._rooms is None or self._rooms.layout.hash != offer.layout:
            self._rooms = None  # free the old room first
            try:
                layout = self._board.layout(offer)
                self._rooms = _Rooms(layout, backend=self._backend, into=self._into, slabs=self._slabs)
            except LayoutMismatchError:
                self._board.leave(self._member)  # the sender need not wait for one that can't receive
                raise
        return self._rooms


class _Rooms:
    """Where a version goes: into the receiver's tensors, or into the one of two stagings that does not serve."""

    def __init__(
        self, layout: WeightLayout, *, backend: Backend, into: Mapping[str, torch.Tensor] | None, slabs: int
    ) -> None:
        self.layout, self._device = layout, backend.device()
        self.sums = Checksums(layout, device=self._device)
        in_place = None if into is None else InPlace(layout, into, backend=backend, slabs=slabs)
        self._pair: list[Place | None] = [in_place, in_place]

    def spare(self) -> Place:
        """Return the one to receive into."""
        room = self._pair[0] or Staging.on(self._device, self.layout)
        self._pair[0] = room
        return room

    def flip(self) -> Mapping[str, torch.Tensor]:
        """Let the version that was just received serve; return its tensors."""
        room = self.spare()
        room.finish()
        self._pair.reverse()
        return room.tensors
