"""What sender and receivers tell each other: small typed notes in a store, each with one writer. No pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hwrl.comm import PrefixStore, Store, await_keys, clone_store, forget_group, store_failures
from hwrl.errors import LayoutMismatchError, TransferFailedError
from hwrl.weights.layout import WeightLayout

Metadata = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Offer:
    """A version that the sender offers. ``number`` grows with every offer of every sender of the link.

    ``to`` are the receivers (their join numbers) of a device or ipc transfer, in rank order from 1; ``group`` names the
    groups, ``lanes`` many. ``timeout_s`` is the sender's, from which receivers derive how long they wait for it.
    A host version lies in place ``slot``; ``files`` are the numbers of all places' files, in ``directory`` or, if that
    is empty, among the open files of process ``pid``, and ``inodes`` tell whether they are still those. ``before`` is
    the offer of the version that stays until this one is whole, 0 if there is none.
    """

    number: int
    epoch: int
    version: int
    transport: str
    layout: str
    to: list[int] = field(default_factory=list)
    group: str = ""
    lanes: int = 1
    timeout_s: float = 60.0
    directory: str = ""
    pid: int = 0
    slot: int = 0
    files: list[int] = field(default_factory=list)
    inodes: list[int] = field(default_factory=list)
    before: int = 0
    metadata: dict[str, str | int | float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: bytes) -> Offer:
        """Read what the board wrote; raises TransferFailedError for anything else."""
        try:
            offer = cls(**json.loads(text))
            good = all(isinstance(getattr(offer, name), type(value)) for name, value in asdict(_SAMPLE).items())
            good = good and all(isinstance(number, int) for number in [*offer.to, *offer.files, *offer.inodes])
            good = good and math.isfinite(offer.timeout_s) and offer.timeout_s > 0
        except (ValueError, TypeError, RecursionError) as exc:
            raise _unreadable("an offer", text) from exc
        if not good or not _is_metadata(offer.metadata):
            raise _unreadable("an offer", text)
        return offer


_AGAIN, _GIVEN_UP = "again", "given up: "
_ABSENT = "\x01"  # a value that is never written; compare_set returns it for a missing key, and writes nothing
_SAMPLE = Offer(number=0, epoch=0, version=0, transport="", layout="")


class Board:
    """The notes of the link ``name`` in ``store``."""

    def __init__(self, store: Store, *, name: str) -> None:
        # A connection of its own: a client that waits is locked for other threads, and making a group waits.
        self.store: Store = PrefixStore(f"weights/{name}", clone_store(store))
        self._notes = _Notes(self.store)
        self.name = name

    # -- the sender writes --------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Count one more sender of this link and return its number; the earlier ones are thereby deposed."""
        return self._notes.add("epochs", 1)

    def check_epoch(self, epoch: int) -> None:
        """Raise TransferFailedError if sender number ``epoch`` is deposed."""
        newest = self.epoch()
        if newest != epoch:
            raise TransferFailedError(
                f"this sender of {self.name!r} is deposed",
                why=f"it is sender {epoch}, and sender {newest} has taken over",
                fix="end this process; two trainers must not share a link's name",
            )

    def epoch(self) -> int:
        """Return the newest sender's number, 0 before there was one."""
        return self._notes.add("epochs", 0)

    def put_layout(self, layout: WeightLayout) -> None:
        """Make ``layout`` known under its hash."""
        self._notes.set(f"layout/{layout.hash}", layout.to_json())

    def put_offer(self, offer: Offer) -> None:
        """Publish ``offer``; receivers see all of it or nothing."""
        self._notes.set(f"offer/{offer.number}", json.dumps(asdict(offer)))
        self._notes.add("offers", 1)

    def say_go(self, offer: Offer, *, go: bool) -> None:
        """Tell the receivers that all are here, or that the offer is withdrawn."""
        self._notes.set(f"go/{offer.number}", "go" if go else "withdrawn")

    def put_verdict(self, offer: Offer, *, committed: bool) -> None:
        """Tell the receivers how the round ended; if it did not commit, another offer follows or :meth:`give_up`."""
        self._notes.set(f"verdict/{offer.number}", "committed" if committed else _AGAIN)

    def give_up(self, offer: Offer, why: str) -> None:
        """Tell the receivers that no offer follows ``offer``; does nothing if it ended before, or nobody saw it."""
        if self.newest() >= offer.number and self._verdict(offer) in (None, _AGAIN):
            self._notes.set(f"verdict/{offer.number}", _GIVEN_UP + why)

    def put_note(self, offer: Offer, note: str, text: str) -> None:
        """Tell the receivers of ``offer`` something that only its transport understands."""
        self._notes.set(f"{note}/{offer.number}", text)

    def exclude(self, member: int, why: str) -> None:
        """Strike a receiver off; it reads ``why``."""
        self._notes.set(f"excluded/{member}", why)
        self._notes.delete(f"join/{member}")

    def absent(self, offer: Offer, members: Collection[int], *, note: str, timeout_s: float) -> list[int]:
        """Wait for each member's ``note`` ("here", say) and return those which did not write it in time."""
        keys = {f"{note}/{offer.number}/{member}": member for member in members}
        return [keys[key] for key in await_keys(self.store, keys, timeout_s=timeout_s)]

    def has_verdict(self, offer: Offer) -> bool:
        """Return whether the sender has ended the transfer."""
        return self._verdict(offer) is not None

    def given_up(self, offer: Offer) -> str | None:
        """Return why the sender gave up after ``offer``, or None if it did not."""
        verdict = self._verdict(offer) or ""
        return verdict.removeprefix(_GIVEN_UP) if verdict.startswith(_GIVEN_UP) else None

    def vote(self, offer: Offer, member: int) -> str:
        """Return what a member that is not absent voted."""
        return (self._notes.get(f"vote/{offer.number}/{member}") or b"").decode()

    def join_counts(self) -> tuple[int, int]:
        """Return how many requests to join are complete, and the newest number that was given out."""
        return self._notes.add("joins", 0), self._notes.add("numbers", 0)

    def replica(self, member: int) -> str | None:
        """Return the replica's name under which a receiver joined, or None if it has not or no longer wants to."""
        found = self._notes.get(f"join/{member}")
        return None if found is None else found.decode()

    def forget(self, offer: Offer) -> None:
        """Delete the notes of an offer that no receiver waits for any more."""
        notes = [f"{note}/{offer.number}/{member}" for note in ("here", "vote") for member in offer.to]
        for note in ("go", "verdict", "offer"):
            notes.append(f"{note}/{offer.number}")
        for key in notes:
            self._notes.delete(key)

    def forget_note(self, offer: Offer, note: str, members: Collection[int] | None = None) -> None:
        """Delete a note on ``offer`` that only its transport understands: the sender's, or that of ``members``."""
        for writer in [""] if members is None else [f"/{member}" for member in members]:
            self._notes.delete(f"{note}/{offer.number}{writer}")

    def forget_group(self, name: str) -> None:
        """Delete what making the groups ``name`` left in the store; no receiver makes one of them any more."""
        with store_failures():
            forget_group(self.store, name=name)

    # -- the receivers write ------------------------------------------------------------------------------------

    def join(self, replica: str) -> int:
        """Ask to be sent versions; return the number under which this receiver is known from now on."""
        number = self._notes.add("numbers", 1)
        self._notes.set(f"join/{number}", replica)
        self._notes.add("joins", 1)
        return number

    def leave(self, member: int) -> None:
        """Take the request to join back; the number is not heard of again."""
        for note in ("join", "excluded"):
            self._notes.delete(f"{note}/{member}")

    def say(self, offer: Offer, member: int, *, note: str, text: str) -> None:
        """Write this receiver's ``note`` ("here", say) on an offer."""
        self._notes.set(f"{note}/{offer.number}/{member}", text)

    # -- both read ----------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """Return the newest offer's number, 0 before there was one. One short round trip."""
        return self._notes.add("offers", 0)

    def offer(self, number: int) -> Offer | None:
        """Return offer ``number``, or None if it was forgotten."""
        text = self._notes.get(f"offer/{number}")
        return None if text is None else Offer.read(text)

    def await_offer(self, number: int, *, timeout_s: float) -> None:
        """Block until offer ``number`` is there or ``timeout_s`` passed."""
        await_keys(self.store, [f"offer/{number}"], timeout_s=timeout_s)

    def await_note(self, offer: Offer, note: str, *, timeout_s: float) -> bytes | None:
        """Block until the sender's ``note`` ("go", say) on ``offer`` is there; None after ``timeout_s``."""
        await_keys(self.store, [f"{note}/{offer.number}"], timeout_s=timeout_s)
        return self._notes.get(f"{note}/{offer.number}")

    def excluded(self, member: int) -> str | None:
        """Return why a receiver was excluded, or None if it was not."""
        found = self._notes.get(f"excluded/{member}")
        return None if found is None else found.decode()

    def _verdict(self, offer: Offer) -> str | None:
        found = self._notes.get(f"verdict/{offer.number}")
        return None if found is None else found.decode(errors="replace")

    def layout(self, offer: Offer) -> WeightLayout:
        """Return the layout that ``offer`` follows; raises LayoutMismatchError if it is malformed or another one."""
        layout = WeightLayout.from_json(self._notes.get(f"layout/{offer.layout}") or b"")
        if layout.hash != offer.layout:
            raise LayoutMismatchError(
                "this is not the layout of the offer", why="its hash is another", fix="use the same hwrl on both sides"
            )
        return layout


class _Notes:
    """A store's keys, none of whose operations waits for a key; a lost store is a PeerLostError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, key: str, number: int) -> int:
        with store_failures():
            return self._store.add(key, number)

    def set(self, key: str, value: str) -> None:
        with store_failures():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is none. One round trip, and no wait if the key is deleted meanwhile."""
        with store_failures():
            found = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def delete(self, key: str) -> None:
        with store_failures():
            self._store.delete_key(key)


def checked_metadata(metadata: Metadata | None) -> dict[str, str | int | float]:
    """Return a copy of ``metadata``; raises TransferFailedError unless it maps text to text and numbers."""
    found = dict(metadata or {})
    if not _is_metadata(found):
        raise TransferFailedError(
            "metadata cannot be sent", why=f"{found!r} holds more than text and numbers", fix="send text and numbers"
        )
    return found


def _is_metadata(found: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) and isinstance(value, str | int | float) for key, value in found.items())


def _unreadable(what: str, text: bytes) -> TransferFailedError:
    return TransferFailedError(
        f"{what} cannot be read", why=f"the store holds {text[:80]!r}", fix="use the same hwrl on both sides"
    )
