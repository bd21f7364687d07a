"""Whom the sender sends to: receivers join, leave, are excluded, and are replaced by a restarted namesake."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hwrl.weights.board import Board

_LATE = 100
"""A receiver that has a number and has not completed its request when so many others have come is not coming."""

_log = logging.getLogger("hwrl.weights")


class Roster:
    """The receivers that asked to join, as one sender knows them. ``members`` maps their numbers to replica names."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.members: dict[int, str] = {}
        self.served: dict[int, int] = {}  # member → the version that it has committed
        self._joins = 0
        self._numbers = 0
        self._not_seen: set[int] = set()  # given out, but the request is not complete; most belong to the past

    def refresh(self) -> None:
        """Read who joined and who left since the last time; a restarted replica replaces its namesake."""
        joins, numbers = self._board.join_counts()  # first: who joined again had left before
        for member in [member for member in self.members if self._board.replica(member) is None]:
            self._drop(member)
        if joins == self._joins:
            return
        self._not_seen.update(range(self._numbers + 1, numbers + 1))
        self._joins, self._numbers = joins, numbers
        for number in sorted(self._not_seen):
            replica = self._board.replica(number)
            if replica is not None:
                self._admit(number, replica)
        # Those that were not there have been taken back if every request is complete, or died long ago.
        self._not_seen = {number for number in self._not_seen if joins < numbers < number + _LATE}

    def without(self, version: int) -> list[int]:
        """Return the members that have not committed ``version``, in the order in which they joined."""
        return [member for member in sorted(self.members) if self.served.get(member) != version]

    def exclude(self, members: Collection[int], why: str) -> dict[str, str]:
        """Strike members off, which lets them know; return their replica names with the reason."""
        struck = {}
        for member in members:
            if member in self.members:
                struck[self.members[member]] = why
                _log.warning("receiver %r is excluded: %s", self.members[member], why)
                self._board.exclude(member, why)
                self._drop(member)
        return struck

    def _admit(self, number: int, replica: str) -> None:
        self._not_seen.discard(number)
        earlier = [member for member, name in self.members.items() if name == replica]
        self.exclude(earlier, f"another receiver joined as replica {replica!r}")
        self.members[number] = replica

    def _drop(self, member: int) -> None:
        self.members.pop(member, None)
        self.served.pop(member, None)
