"""The leases of a rollouter: one open request, and no lease for weights that the engine does not have."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from hwrl.interfaces import PromptGroup
from hwrl.rollout import PromptLease
from hwrl.rollout.leases import LeaseQueue


class SlowLedger:
    """Keeps each request open until the test answers it."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, Future[list[PromptLease]]]] = []

    def lease(self, count: int) -> Future[list[PromptLease]]:
        self.requests.append((count, Future()))
        return self.requests[-1][1]

    def answer(self, *leases: PromptLease) -> None:
        self.requests[-1][1].set_result(list(leases))

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        raise AssertionError("a queue hands in nothing")

    def fail(self, lease: PromptLease, reason: str) -> None:
        raise AssertionError(reason)

    def renew(self, leases: Sequence[PromptLease]) -> None:
        raise AssertionError("a queue makes no progress")


def lease_of(number: int, *, version: int = 0, incarnation: int = 0) -> PromptLease:
    return PromptLease(100 + number, number, version, incarnation)


def test_leases_are_requested_when_there_is_room_none_waits_and_no_request_is_open() -> None:
    ledger = SlowLedger()
    queue = LeaseQueue(ledger)
    queue.refill(room=0)
    assert not ledger.requests
    queue.refill(room=4)
    queue.refill(room=5)
    assert [count for count, _ in ledger.requests] == [4], "one is open"
    ledger.answer(lease_of(1), lease_of(2))
    queue.refill(room=5)
    queue.refill(room=5)
    assert len(queue) == 2 and len(ledger.requests) == 1, "two wait"
    assert queue.pop_ready(version=0, incarnation=0) == [lease_of(1), lease_of(2)]
    queue.refill(room=5)
    assert len(queue) == 0 and len(ledger.requests) == 2


def test_a_lease_waits_for_its_version_and_its_incarnation_and_an_old_one_is_dropped() -> None:
    ledger = SlowLedger()
    queue = LeaseQueue(ledger)
    queue.refill(room=4)
    old, now, later = lease_of(1), lease_of(2, version=3, incarnation=1), lease_of(3, version=4, incarnation=1)
    ahead = lease_of(4, incarnation=2)
    ledger.answer(old, now, later, ahead)
    queue.refill(room=4)
    assert queue.pop_ready(version=3, incarnation=1) == [now]
    assert len(queue) == 2, "the old one is dropped"
    queue.drop_older(incarnation=1)
    assert len(queue) == 2, "a lease of a later incarnation waits for its weights"
    queue.drop_older(incarnation=2)
    assert queue.pop_ready(version=0, incarnation=2) == [ahead]
