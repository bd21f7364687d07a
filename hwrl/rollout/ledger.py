"""The account of every prompt: issued, running, finished, trained; and the staleness bound that it keeps.

Prompts are numbered in stream order; a sequence number stands for one prompt, for good. The ledger gives numbers to
rollouters on lease, takes finished groups back, and hands them to the trainer. It does no I/O and reads no clock.

Two rules hold the staleness bound without dropping work:

* Admission (AReaL, arXiv:2505.24298, §5.1): accepted + running + trained ≤ (max_staleness + version + 1) × batch.
* Consumption: what was admitted at version v has its deadline at version v + max_staleness. Groups are consumed as
  they finish, oldest first; but a younger one may go before an older one that still runs only while enough places
  are left before the older one's deadline. By the first rule there are such places for every group at first, and
  this rule keeps them, so that a straggler makes the trainer wait rather than go stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwrl.errors import EngineError
from hwrl.interfaces import PromptGroup


@dataclass(frozen=True)
class PromptLease:
    """One prompt, given to one replica to work on.

    It may begin with weights of version ``version`` or newer, published by incarnation ``incarnation`` of the trainer.
    """

    lease_id: int
    sequence_number: int
    version: int
    incarnation: int


@dataclass
class _Leased:
    lease: PromptLease
    replica: str
    deadline_s: float


@dataclass(frozen=True)
class LedgerCounts:
    """How many groups are where, and what went wrong so far; ``rejected`` groups had tokens of other weights."""

    trained: int
    accepted: int
    running: int
    returned: int
    failures: int
    expired: int
    rejected: int


class PromptLedger:
    """See the module. Not thread-safe: one owner calls it.

    It gives out nothing before the first :meth:`advance`, at the start and after a resume: only then are there weights
    of this incarnation of the trainer to begin with. A version means nothing without the incarnation that published
    it: a trainer that goes back to a checkpoint publishes other weights under the same numbers.

    ``groups_per_version`` groups are trained under each weight version; ``total_groups`` ends the stream;
    ``group_timeout_s`` is how long a replica may hold a lease; ``max_attempts`` is how often a prompt is tried.
    """

    def __init__(
        self,
        *,
        groups_per_version: int,
        max_staleness: int,
        total_groups: int,
        group_timeout_s: float = 600.0,
        max_attempts: int = 3,
    ) -> None:
        self._groups_per_version = groups_per_version
        self._max_staleness = max_staleness
        self._total_groups = total_groups
        self._group_timeout_s = group_timeout_s
        self._max_attempts = max_attempts
        self.version = 0
        self.incarnation = 0
        self._open = False
        self._trained = 0
        self._next = 0
        self._returned: list[int] = []
        self._failed_attempts: dict[int, int] = {}
        self._next_lease = 0
        self._running: dict[int, _Leased] = {}
        self._accepted: dict[int, tuple[PromptLease, PromptGroup]] = {}
        self._failures = self._expired = self._rejected = 0

    # -- rollout side -------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Return how many groups may be leased now under the staleness bound and the stream's end."""
        bound = (self._max_staleness + self.version + 1) * self._groups_per_version
        open_groups = self._trained + len(self._accepted) + len(self._running)
        left = len(self._returned) + self._total_groups - self._next
        return max(0, min(bound - open_groups, left)) if self._open else 0

    def lease(self, count: int, *, replica: str, now_s: float) -> list[PromptLease]:
        """Give up to ``count`` prompts to ``replica``: returned ones first, oldest first, then new ones."""
        leases = []
        for _ in range(min(count, self.capacity())):
            number = self._pop_number()
            lease = PromptLease(self._next_lease, number, self.version, self.incarnation)
            self._next_lease += 1
            self._running[number] = _Leased(lease, replica, now_s + self._group_timeout_s)
            leases.append(lease)
        return leases

    def complete(self, group: PromptGroup) -> bool:
        """Take a finished group; return False if its lease is over, or if its weights are not those of the lease.

        A group with other weights counts as rejected and as a failed try, and its prompt is generated anew. Raises
        EngineError when that has happened ``max_attempts`` times.
        """
        running = self._running.get(group.sequence_number)
        if running is None or running.lease.lease_id != group.lease_id:
            self._rejected += group.incarnation != self.incarnation
            return False
        reason = self._foreign(group, running.lease)
        if reason is not None:
            self._rejected += 1
            self.fail(running.lease, reason=reason)
            return False
        del self._running[group.sequence_number]
        self._accepted[group.sequence_number] = (running.lease, group)
        return True

    def _foreign(self, group: PromptGroup, lease: PromptLease) -> str | None:
        """Return why the weights of ``group`` are not those of ``lease``, or None.

        The trainer publishes a version before it advances the ledger, so tokens may be one version ahead.
        """
        if group.incarnation != lease.incarnation:
            return f"incarnation {group.incarnation} of the trainer made its weights, and {lease.incarnation} runs"
        if lease.version <= group.oldest_version and group.newest_version <= self.version + 1:
            return None
        return (
            f"its tokens are of versions {group.oldest_version} to {group.newest_version}, and only versions "
            f"{lease.version} to {self.version + 1} are possible"
        )

    def fail(self, lease: PromptLease, *, reason: str) -> None:
        """Count a failed try of a prompt and put it back; raise when it has failed ``max_attempts`` times."""
        running = self._running.get(lease.sequence_number)
        if running is None or running.lease != lease:
            return
        self._failures += 1
        self._give_back(lease.sequence_number)
        attempts = self._failed_attempts.get(lease.sequence_number, 0) + 1
        self._failed_attempts[lease.sequence_number] = attempts
        if attempts >= self._max_attempts:
            raise EngineError(
                f"prompt {lease.sequence_number} failed {self._max_attempts} times",
                why=reason,
                fix="fix what the reason names; rollout.max_attempts sets how often a prompt is tried",
            )

    def forget_replica(self, replica: str) -> int:
        """Put back all that ``replica`` holds, because it is gone; return how many groups that were."""
        lost = [number for number, running in self._running.items() if running.replica == replica]
        for number in lost:
            self._give_back(number)
        return len(lost)

    def expire(self, now_s: float) -> list[str]:
        """Put back the groups whose deadline has passed; return the replicas that held them."""
        late = [number for number, running in self._running.items() if running.deadline_s <= now_s]
        replicas = sorted({self._running[number].replica for number in late})
        for number in late:
            self._expired += 1
            self._give_back(number)
        return replicas

    # -- training side ------------------------------------------------------------------------------------------

    def advance(self, version: int) -> None:
        """Note that the trainer has published ``version``."""
        if version < self.version:
            raise EngineError(
                f"the weight version cannot go from {self.version} back to {version}",
                why="a ledger counts forward; going back is a resume",
                fix="restore the ledger with load_state_dict",
            )
        self.version = version
        self._open = True

    def take(self, count: int) -> list[PromptGroup] | None:
        """Return ``count`` groups to train on under the current version, oldest first, or None: not ready yet.

        No group of the batch, and none that is left behind, exceeds the staleness bound.
        """
        chosen = self._consumable(count)
        if len(chosen) < count:
            return None
        for group in chosen:
            del self._accepted[group.sequence_number]
            self._failed_attempts.pop(group.sequence_number, None)
        self._trained += count
        return chosen

    def _consumable(self, count: int) -> list[PromptGroup]:
        """Return up to ``count`` finished groups, oldest first, that leave every other group its place in time."""
        places = self._spare_places()
        chosen: list[PromptGroup] = []
        for lease, group in sorted(self._accepted.values(), key=lambda pair: pair[0].lease_id):
            overtaken = [version for version in places if version < lease.version]
            if len(chosen) == count or any(places[version] == 0 for version in overtaken):
                break
            for version in overtaken:
                places[version] -= 1
            chosen.append(group)
        return chosen

    def _spare_places(self) -> dict[int, int]:
        """Return, by lease version, how many training places before its deadline no group of it or older needs."""
        leases = [lease for lease, _ in self._accepted.values()] + [work.lease for work in self._running.values()]
        versions = sorted(lease.version for lease in leases)
        return {
            version: (version + self._max_staleness + 1) * self._groups_per_version - self._trained - older
            for older, version in enumerate(versions, start=1)
        }

    # -- state --------------------------------------------------------------------------------------------------

    def counts(self) -> LedgerCounts:
        """Return how many groups are where."""
        return LedgerCounts(
            trained=self._trained,
            accepted=len(self._accepted),
            running=len(self._running),
            returned=len(self._returned),
            failures=self._failures,
            expired=self._expired,
            rejected=self._rejected,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON-able data: what was trained, and what is still owed.

        Groups that are running or accepted are owed: after a resume their prompts are generated again, since the
        old responses belong to weights that are gone.
        """
        owed = sorted({*self._returned, *self._running, *self._accepted})
        return {
            "version": self.version,
            "trained": self._trained,
            "next": self._next,
            "owed": owed,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, incarnation: int) -> None:
        """Continue from :meth:`state_dict` with ``incarnation`` of the trainer; every lease of before is over."""
        self.version, self.incarnation = int(state["version"]), incarnation
        self._open = False
        self._trained = int(state["trained"])
        self._next = int(state["next"])
        self._running.clear()
        self._accepted.clear()
        self._failed_attempts.clear()
        self._returned = sorted(int(number) for number in state["owed"])

    def _pop_number(self) -> int:
        if self._returned:
            return self._returned.pop(0)
        self._next += 1
        return self._next - 1

    def _give_back(self, number: int) -> None:
        del self._running[number]
        self._returned.append(number)
        self._returned.sort()
