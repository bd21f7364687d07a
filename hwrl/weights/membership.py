"""The sender's list of a link's receivers, its members. They join, leave, are excluded, and are replaced.

The receivers' side is :mod:`hwrl.weights.registrations`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from hwrl.comm import Store
from hwrl.weights.control import ControlChannel

LOST = 0
"""The content of a member whose version is at risk in a transfer: it may hold a mixture. Real contents begin at 1."""
_LATE = 100
"""A join request that is still incomplete after this many newer ones never completes: its process is dead."""

_log = logging.getLogger("hwrl.weights")


class Membership:
    """The receivers that have joined: ``members`` maps join numbers to replica names."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self.members: dict[int, str] = {}
        self.served: dict[int, int] = {}
        """Member → the number of the content for which it has voted "whole", or LOST."""
        self._has_committed = False  # whether some member has ever committed a version, also if it has left since
        self._postponed_s: dict[int, float] = {}  # new member → when it missed its first version
        self._joins_seen = 0
        self._numbers_seen = 0
        self._incomplete: set[int] = set()  # join numbers whose request is not complete yet

    def refresh(self) -> None:
        """Read who has joined and left since the last call. A restarted replica replaces the old one of its name."""
        joins, numbers = self._channel.join_counts()  # before the members: a receiver that joins again leaves first
        for member in [member for member in self.members if self._channel.replica(member) is None]:
            self._drop(member)
        if joins == self._joins_seen:
            return
        self._incomplete.update(range(self._numbers_seen + 1, numbers + 1))
        self._joins_seen, self._numbers_seen = joins, numbers
        for number in sorted(self._incomplete):
            replica = self._channel.replica(number)
            if replica is not None:
                self._admit(number, replica)
        # If all requests are complete, those not found were withdrawn. Old incomplete ones are of dead processes.
        self._incomplete = {number for number in self._incomplete if joins < numbers < number + _LATE}

    def lacking(self, content: int, replicas: Collection[str] | None = None) -> list[int]:
        """Return the members without ``content``, in join order; with ``replicas`` only members of these names."""
        return [
            member
            for member in sorted(self.members)
            if self.served.get(member) != content and (replicas is None or self.members[member] in replicas)
        ]

    def names(self) -> tuple[str, ...]:
        """Return the replica names of the members, in join order."""
        return self.names_of(sorted(self.members))

    def names_of(self, members: Collection[int]) -> tuple[str, ...]:
        """Return the replica names of those ``members`` still here."""
        return tuple(self.members[member] for member in members if member in self.members)

    def absent(self, replicas: Collection[str]) -> list[str]:
        """Return the names among ``replicas`` that have not joined."""
        joined = self.names()
        return [name for name in replicas if name not in joined]

    def note_committed(self, members: Collection[int], content: int) -> None:
        """Record that ``members`` have voted "whole" for ``content``. Members gone meanwhile are ignored."""
        self._has_committed = True
        self.served |= dict.fromkeys(self.members.keys() & set(members), content)

    def note_at_risk(self, members: Collection[int]) -> None:
        """Record that a transfer to ``members`` begins. It may overwrite their old version in place."""
        self.served |= dict.fromkeys(self.served.keys() & set(members), LOST)

    def new_among(self, members: Collection[int]) -> set[int]:
        """Return the new ones of ``members``: they have committed nothing. Empty until some member has committed."""
        return {member for member in members if member not in self.served} if self._has_committed else set()

    def postpone(self, members: Collection[int], *, since_s: float, limit_s: float) -> tuple[list[str], list[int]]:
        """Record that the new ``members`` missed a version, proposed at ``since_s`` of the monotonic clock.

        Return the names of those that get a later version, and the silent members: they missed their first version
        ``limit_s`` ago or earlier.
        """
        first_s = {one: self._postponed_s.setdefault(one, since_s) for one in members if one in self.members}
        now_s = time.monotonic()
        silent = [member for member, began_s in first_s.items() if now_s - began_s >= limit_s]
        return [self.members[member] for member in first_s if member not in silent], silent

    def exclude(self, members: Collection[int], why: str) -> dict[str, str]:
        """Exclude ``members`` and tell them why; return their replica names with the reason."""
        excluded = {}
        for member in members:
            if member in self.members:
                excluded[self.members[member]] = why
                _log.warning("receiver %r is excluded: %s", self.members[member], why)
                self._channel.exclude(member, why)
                self._drop(member)
        return excluded

    def _admit(self, number: int, replica: str) -> None:
        self._incomplete.discard(number)
        earlier = [member for member, name in self.members.items() if name == replica]
        self.exclude(earlier, f"another receiver joined under the name {replica!r}")
        self.members[number] = replica

    def _drop(self, member: int) -> None:
        self.members.pop(member, None)
        self.served.pop(member, None)
        self._postponed_s.pop(member, None)


def withdraw(store: Store, *, names: Collection[str], replica: str) -> None:
    """Withdraw the join requests of a dead ``replica`` from the links ``names``, so that no sender waits for it.

    A dead process cannot leave by itself. Receivers named ``replica/...`` are withdrawn, too; a ``replica`` with a
    slash is one receiver. Call this before a replacement of the same name joins. It opens a connection to the store for
    each link, and needs one round trip for each join request so far and two more for each request of the replica.
    """
    for name in names:
        channel = ControlChannel(store, name=name, transports={})
        for number in range(1, channel.join_counts()[1] + 1):
            name_there = channel.replica(number) or ""
            if replica in (name_there, name_there.partition("/")[0]):
                channel.leave(number)
