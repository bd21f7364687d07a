"""The prompt ledger: every prompt is leased, running, finished or trained, within the staleness bound.

Prompts are numbered in stream order, and a sequence number always means the same prompt. The ledger leases numbers to
rollouters, takes finished groups, and hands them to the trainer. It does no I/O and reads no clock.

Two rules hold the staleness bound without dropping work:

* Admission (AReaL, arXiv:2505.24298, §5.1): accepted + running + trained ≤ (max_staleness + version + 1) × batch.
* Consumption: a group admitted at version v must be trained by version v + max_staleness, its deadline. Finished
  groups are consumed oldest first. A younger group overtakes an older running one only if enough training places
  remain before the older one's deadline. Admission starts with enough places for every group, and this rule keeps
  them. So a straggler makes the trainer wait instead of becoming stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwrl.errors import EngineError
from hwrl.interfaces import PromptGroup


@dataclass(frozen=True)
class PromptLease:
    """The permit for one replica to generate one prompt's responses.

    Generation may start with weights of ``version`` or newer, from ``incarnation`` of the trainer.
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
    """The number of groups in each state, and of failures so far. ``rejected`` groups had tokens of wrong weights."""

    trained: int
    accepted: int
    running: int
    returned: int
    failures: int
    expired: int
    rejected: int


class PromptLedger:
    """Leases prompts and releases batches; the module explains the rules. Not thread-safe.

    It leases nothing before the first :meth:`advance`, at the start and after a resume: until then the trainer's
    incarnation has published no weights. A version is only meaningful with its incarnation: after going back to a
    checkpoint, a trainer publishes other weights under the same numbers.

    ``groups_per_version`` groups are trained under each weight version. ``total_groups`` ends the stream. A lease
    expires after ``group_timeout_s``. A prompt is tried at most ``max_attempts`` times.
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
        """Return the number of groups that the staleness bound and the stream's end admit now."""
        bound = (self._max_staleness + self.version + 1) * self._groups_per_version
        open_groups = self._trained + len(self._accepted) + len(self._running)
        left = len(self._returned) + self._total_groups - self._next
        return max(0, min(bound - open_groups, left)) if self._open else 0

    def lease(self, count: int, *, replica: str, now_s: float) -> list[PromptLease]:
        """Lease up to ``count`` prompts to ``replica``: returned prompts first, oldest first, then new ones."""
        leases = []
        for _ in range(min(count, self.capacity())):
            number = self._pop_number()
            lease = PromptLease(self._next_lease, number, self.version, self.incarnation)
            self._next_lease += 1
            self._running[number] = _Leased(lease, replica, now_s + self._group_timeout_s)
            leases.append(lease)
        return leases

    def complete(self, group: PromptGroup) -> bool:
        """Take a finished group. Return False if its lease is over or its weights do not fit the lease.

        A group with wrong weights counts as rejected and as a failed attempt; its prompt is generated again. Raises
        EngineError after ``max_attempts`` failed attempts.
        """
        running = self._running.get(group.sequence_number)
        if running is None or running.lease.lease_id != group.lease_id:
            self._rejected += group.incarnation != self.incarnation
            return False
        reason = self._wrong_weights(group, running.lease)
        if reason is not None:
            self._rejected += 1
            self.fail(running.lease, reason=reason)
            return False
        del self._running[group.sequence_number]
        self._accepted[group.sequence_number] = (running.lease, group)
        return True

    def _wrong_weights(self, group: PromptGroup, lease: PromptLease) -> str | None:
        """Return the reason if the weights of ``group`` do not fit ``lease``, else None.

        The trainer publishes a version before it advances the ledger, so tokens may be one version ahead.
        """
        if group.incarnation != lease.incarnation:
            return f"its weights are of incarnation {group.incarnation} of the trainer, and {lease.incarnation} runs"
        if lease.version <= group.oldest_version and group.newest_version <= self.version + 1:
            return None
        return (
            f"its tokens are of versions {group.oldest_version} to {group.newest_version}, and only versions "
            f"{lease.version} to {self.version + 1} are possible"
        )

    def fail(self, lease: PromptLease, *, reason: str) -> None:
        """Count a failed attempt and put the prompt back. Raise EngineError after ``max_attempts`` attempts."""
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
                fix="fix the cause in the reason; rollout.max_attempts sets the number of attempts",
            )

    def forget_replica(self, replica: str) -> int:
        """Put back all leases of the lost ``replica``; return their number."""
        lost = [number for number, running in self._running.items() if running.replica == replica]
        for number in lost:
            self._give_back(number)
        return len(lost)

    def expire(self, now_s: float) -> list[str]:
        """Put back the expired leases; return the replicas that held them."""
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
        """Return ``count`` groups to train on under the current version, oldest first; None if it is too early.

        Neither these groups nor the remaining ones will exceed the staleness bound.
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
        """Return up to ``count`` finished groups, oldest first. Every other group keeps a place before its deadline."""
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
        """Return, for each lease version, the training places before its deadline minus the groups that need one."""
        leases = [lease for lease, _ in self._accepted.values()] + [work.lease for work in self._running.values()]
        versions = sorted(lease.version for lease in leases)
        return {
            version: (version + self._max_staleness + 1) * self._groups_per_version - self._trained - older
            for older, version in enumerate(versions, start=1)
        }

    # -- state --------------------------------------------------------------------------------------------------

    def counts(self) -> LedgerCounts:
        """Return the number of groups in each state."""
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
        """Return the state for a checkpoint, as JSON-able data: the trained prompts, and the owed ones.

        Running and accepted groups are owed: after a resume their prompts are generated again, because the old
        responses came from lost weights.
        """
        owed = sorted({*self._returned, *self._running, *self._accepted})
        return {
            "version": self.version,
            "trained": self._trained,
            "next": self._next,
            "owed": owed,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, incarnation: int) -> None:
        """Continue from :meth:`state_dict` with ``incarnation`` of the trainer. All earlier leases are over."""
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
