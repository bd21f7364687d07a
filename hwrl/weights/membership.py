"""The receivers of a link as its sender knows them: they join, leave, are excluded, and are replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from typing import NamedTuple

from hwrl.comm import Store
from hwrl.weights.control import ControlChannel

LOST = 0
"""The content of a member after a begun transfer: perhaps none. Contents are numbered from 1."""
_LATE = 100
"""A join request still incomplete after so many newer ones is never completed: its process died."""

_log = logging.getLogger("hwrl.weights")


class Postponed(NamedTuple):
    """New members left out of a version. ``names`` get a later one; ``silent`` have missed versions for too long."""

    names: list[str]
    silent: list[int]


class Membership:
    """The joined receivers: ``members`` maps join numbers to replica names.

    Another thread may exclude members while one reads them.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel, self._lock = channel, threading.RLock()
        self.members: dict[int, str] = {}
        self.served: dict[int, int] = {}
        """Member → the content committed by it, by its number."""
        self._postponed_s: dict[int, float] = {}  # new member → when it first missed a version
        self._joins_seen = 0
        self._numbers_seen = 0
        self._incomplete: set[int] = set()  # join numbers without a request so far

    def refresh(self) -> None:
        """Read joins and leaves since the last call; a restarted replica replaces its namesake."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        joins, numbers = self._channel.join_counts()  # first: a receiver that joins again has left before
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
        # If every request is complete, the absent ones were withdrawn. Old incomplete ones belong to dead processes.
        self._incomplete = {number for number in self._incomplete if joins < numbers < number + _LATE}

    def lacking(self, content: int, replicas: Collection[str] | None = None) -> list[int]:
        """Return the members without ``content``, in join order; only those called ``replicas``, None: all."""
        with self._lock:
            wanted = [member for member in sorted(self.members) if self.served.get(member) != content]
            return [member for member in wanted if replicas is None or self.members[member] in replicas]

    def names(self) -> tuple[str, ...]:
        """Return the replica names of the members, in join order."""
        with self._lock:
            return tuple(name for _, name in sorted(self.members.items()))

    def absent(self, replicas: Collection[str]) -> list[str]:
        """Return those of ``replicas`` that have not joined."""
        joined = self.names()
        return [name for name in replicas if name not in joined]

    def remove(self, replicas: Collection[str], why: str) -> list[int]:
        """Exclude the members called ``replicas`` for reason ``why``; return their numbers."""
        with self._lock:
            self._refresh()
            members = [member for member, name in self.members.items() if name in replicas]
            self.exclude(members, why)
            return members

    def new_receivers(self) -> tuple[str, ...]:
        """Return the replica names of the members that have committed no version of this sender."""
        with self._lock:
            return tuple(name for member, name in self.members.items() if member not in self.served)

    def note_committed(self, members: Collection[int], content: int) -> None:
        """Note ``content`` as committed by ``members``, without removed ones."""
        with self._lock:
            self.served |= dict.fromkeys(self.members.keys() & set(members), content)

    def note_at_risk(self, members: Collection[int]) -> None:
        """Note the begin of a transfer to ``members``: receiving in place overwrites the old content."""
        with self._lock:
            self.served |= dict.fromkeys(self.served.keys() & set(members), LOST)

    def count_with(self, content: int) -> int:
        """Return how many members have committed ``content``."""
        with self._lock:
            return sum(found == content for found in self.served.values())

    def new_among(self, members: Collection[int]) -> set[int]:
        """Return the ``members`` that have committed nothing. Empty until some member has committed."""
        with self._lock:
            return {member for member in members if member not in self.served} if self.served else set()

    def postpone(self, members: Collection[int], *, since_s: float, limit_s: float) -> Postponed:
        """Note that new ``members`` missed a version, proposed at ``since_s`` of the monotonic clock."""
        with self._lock:
            first_s = {one: self._postponed_s.setdefault(one, since_s) for one in members if one in self.members}
            now_s = time.monotonic()
            silent = [member for member, began_s in first_s.items() if now_s - began_s >= limit_s]
            return Postponed([self.members[member] for member in first_s if member not in silent], silent)

    def exclude(self, members: Collection[int], why: str) -> dict[str, str]:
        """Exclude ``members`` and tell them why; return their replica names with the reason."""
        excluded = {}
        with self._lock:
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
        self.exclude(earlier, f"another receiver joined as replica {replica!r}")
        self.members[number] = replica

    def _drop(self, member: int) -> None:
        self.members.pop(member, None)
        self.served.pop(member, None)
        self._postponed_s.pop(member, None)


def withdraw(store: Store, *, names: Collection[str], replica: str) -> None:
    """Withdraw the requests of a dead ``replica`` from the links ``names``: no sender waits for it after that.

    The process is dead, so it cannot leave by itself. Its receivers ``replica/0``, ``replica/1``, ... count, too. Call
    it before a replacement of the same name joins. Opens a connection to the store for each link. Needs one round trip
    for each request so far, and two more for each one of the replica.
    """
    for name in names:
        channel = ControlChannel(store, name=name, payloads={})
        for number in range(1, channel.join_counts()[1] + 1):
            if (channel.replica(number) or "").partition("/")[0] == replica:
                channel.leave(number)
