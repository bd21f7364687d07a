"""The receivers of a link as its sender knows them: they join, leave, are excluded, and are replaced."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hwrl.weights.control import ControlChannel

_LATE = 100
"""A join request still incomplete after so many newer ones is never completed: its process died."""

_log = logging.getLogger("hwrl.weights")


class Membership:
    """The joined receivers: ``members`` maps join numbers to replica names."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self.members: dict[int, str] = {}
        self.served: dict[int, int] = {}
        """Member → the version committed by it."""
        self._joins_seen = 0
        self._numbers_seen = 0
        self._incomplete: set[int] = set()  # join numbers without a request so far

    def refresh(self) -> None:
        """Read joins and leaves since the last call; a restarted replica replaces its namesake."""
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

    def lacking(self, version: int) -> list[int]:
        """Return the members without ``version``, in join order."""
        return [member for member in sorted(self.members) if self.served.get(member) != version]

    def unserved(self) -> tuple[str, ...]:
        """Return the replica names of the members that have committed no version of this sender."""
        return tuple(name for member, name in self.members.items() if member not in self.served)

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
        self.exclude(earlier, f"another receiver joined as replica {replica!r}")
        self.members[number] = replica

    def _drop(self, member: int) -> None:
        self.members.pop(member, None)
        self.served.pop(member, None)
