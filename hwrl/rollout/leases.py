"""A rollouter's waiting leases, and its view of the ledger."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from hwrl.interfaces import PromptGroup
from hwrl.rollout.ledger import PromptLease


class LedgerClient(Protocol):
    """The ledger as a rollouter sees it, in this process or in another. No call blocks."""

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Request up to ``count`` prompts. The answer comes with the first prompt, or is empty after a while."""
        ...

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups, with the rollouter's running totals."""
        ...

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report a prompt without a usable result."""
        ...

    def renew(self, leases: Sequence[PromptLease]) -> None:
        """Report progress on ``leases``; their time limit begins again."""
        ...


class LeaseQueue:
    """Leases that wait until the engine has their weights. At most one request to the ledger is open."""

    def __init__(self, ledger: LedgerClient) -> None:
        self._ledger = ledger
        self._request: Future[list[PromptLease]] | None = None
        self._waiting: list[PromptLease] = []
        self._requested = 0
        self.leased_unix_s = 0.0
        """When the present leases arrived, in seconds since 1970."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PromptLease]:
        return iter(self._waiting)

    @property
    def promised(self) -> int:
        """The number of prompts that wait, or may still come for the open request."""
        return len(self._waiting) if self._request is None else self._requested

    @property
    def is_empty(self) -> bool:
        """Whether no lease waits, and none is on its way."""
        return self._request is None and not self._waiting

    def refill(self, *, room: int) -> None:
        """Request ``room`` leases if none wait. If the answer to the open request has come, take its leases."""
        if self._request is None and not self._waiting and room > 0:
            self._request, self._requested = self._ledger.lease(room), room
        if self._request is not None and self._request.done():
            self._waiting, self._request = self._request.result(), None
            self.leased_unix_s = time.time()

    def pop_ready(self, *, version: int, incarnation: int) -> list[PromptLease]:
        """Return the leases for weights of ``version`` and ``incarnation``; drop those of older incarnations."""
        ready = [lease for lease in self._waiting if lease.incarnation == incarnation and lease.version <= version]
        self._waiting = [lease for lease in self._waiting if lease not in ready and lease.incarnation >= incarnation]
        return ready

    def drop_older(self, *, incarnation: int) -> None:
        """Drop the waiting leases of earlier incarnations. Those of a later one wait for its weights."""
        self._waiting = [lease for lease in self._waiting if lease.incarnation >= incarnation]
