"""The prompt ledger: every prompt is owed, trained, filtered or failed; training keeps the staleness bound.

Prompts are numbered in stream order, and a sequence number always means the same prompt. The ledger leases numbers to
rollouters, takes finished groups, and hands them to the trainer. It does no I/O and reads no clock.

A prompt is *owed* from its first lease until it is settled. An owed prompt is running, accepted (its group is finished
and waits for training), or returned (it waits for another lease). It is settled as *trained*; as *filtered*, if its
finished group teaches nothing (dynamic sampling: DAPO, arXiv:2503.14476, §3.2); or as *failed*, after its last attempt.
A settled prompt stays settled.

Two rules hold the staleness bound without dropping a group that teaches. A group is *active* while it is running or
accepted.

* Admission (AReaL, arXiv:2505.24298, §5.1): active + trained ≤ (max_staleness + version + 1) × batch. A smaller lead
  admits fewer.
* Consumption: a group admitted at version v must be trained by version v + max_staleness, its deadline. Finished
  groups are consumed oldest first. A younger group overtakes an older running one only if enough training places
  remain before the older one's deadline. So a straggler makes the trainer wait instead of becoming stale.

The proof. Let s be max_staleness, B the groups of a version, t the trained groups, and n(w) the active groups admitted
at version w or before. Version v trains the places vB to (v + 1)B - 1. The claim, for every w with an active group, is
t + n(w) ≤ (w + s + 1)B: there are places for all these groups before the deadline of w.

* Admitting a group at version v changes only n(v), the number of all active groups. The claim for v is the rule of
  admission.
* Training a group of version w adds 1 to t. For every u ≥ w it takes 1 from n(u), so the sum stays. For u < w the group
  overtakes, and the rule of consumption requires a spare place.
* Filtering a group, giving a prompt up, and taking a lease back leave t as it is, and no n(u) grows. The prompt of a
  lost lease is admitted anew.

So the claim always holds, and a group of version w gets a place before (w + s + 1)B: by version w + s. The trainer
waits for running groups only: if all active groups are finished, the oldest ones overtake nobody. Filtered and failed
groups are not active, so admission replaces them at once, and every batch fills up.

The stream ends after ``total_groups`` trained groups: trained + owed ≤ total_groups. Each filtered or failed prompt
extends it by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hwrl.errors import ConfigError, DataError, EngineError
from hwrl.interfaces import PromptGroup
from hwrl.rollout.ledger_state import PromptState, check_state, from_ranges, to_ranges
from hwrl.rollout.number_set import NumberSet

GroupFilter: TypeAlias = Callable[[PromptGroup], bool]
"""Returns whether to train on a finished group."""


def has_variance(group: PromptGroup) -> bool:
    """Return whether two trajectories of ``group`` have different rewards, or different sums of token rewards."""
    return group.rewards_differ


@dataclass(frozen=True)
class PromptLease:
    """The permit for one replica to generate one prompt's responses.

    Generation may start with weights of ``version`` or newer, of the trainer's ``incarnation``.
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


@dataclass
class UntrainedPrompts:
    """Prompts that were settled without training: the filtered ones, and the failed ones with their reasons."""

    filtered: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


class PromptLedger:
    """Leases prompts and releases batches; the module explains the rules. Not thread-safe.

    At the start and after a resume it leases nothing before the first :meth:`advance`, because the trainer's
    incarnation has published no weights yet. Versions of different incarnations are different weights: after
    a resume from a checkpoint, a trainer publishes other weights under the same numbers.

    ``groups_per_version`` groups are trained under each weight version. The stream ends after ``total_groups`` trained
    groups. A lease expires ``group_timeout_s`` after its last progress (:meth:`renew`). A prompt has failed after
    ``max_attempts`` failed attempts. Up to ``max_skipped_in_a_row`` failed prompts in a row are skipped; the next one
    is an error.

    ``lead_groups`` limits the active groups beyond those of the present version; None: only the staleness bound does.
    With fewer than max_staleness × groups_per_version, training places before the deadlines stay free, and younger
    groups may take them before an older running one.

    ``teaches`` decides whether a finished group is trained or filtered; None filters none. Up to
    ``max_filtered_in_a_row`` groups in a row are filtered; the next one is an error.
    """

    def __init__(
        self,
        *,
        groups_per_version: int,
        max_staleness: int,
        total_groups: int,
        lead_groups: int | None = None,
        group_timeout_s: float = 600.0,
        max_attempts: int = 3,
        max_skipped_in_a_row: int = 0,
        teaches: GroupFilter | None = None,
        max_filtered_in_a_row: int = 1000,
    ) -> None:
        if lead_groups is not None and lead_groups < 0:
            raise ValueError(f"lead_groups={lead_groups} must be 0 or more: a batch could never fill up")
        self._groups_per_version = groups_per_version
        self._max_staleness = max_staleness
        self._total_groups = total_groups
        self._group_timeout_s = group_timeout_s
        self._max_attempts = max_attempts
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._teaches = teaches
        self._max_filtered_in_a_row = max_filtered_in_a_row
        self.version = 0
        self.incarnation = 0
        self._open = False  # whether this incarnation has published weights
        self._trained = 0
        self._next = 0  # the first prompt that was never leased
        self._returned: list[int] = []
        self._failed_attempts: dict[int, int] = {}
        self._next_lease = 0
        self._running: dict[int, _Leased] = {}
        self._accepted: dict[int, tuple[PromptLease, PromptGroup]] = {}
        self._active_of: Counter[int] = Counter()  # running and accepted groups, by the version of their lease
        self._finished_of: Counter[int] = Counter()  # the accepted ones
        self._filtered, self._failed = NumberSet(), NumberSet()
        self._untrained = UntrainedPrompts()  # since the last call of take_untrained
        self._filtered_in_a_row = self._skipped_in_a_row = 0
        self._failures = self._expired = self._rejected = 0
        self.lead_groups = lead_groups
        """The most active groups beyond those of the present version; None: as many as the bound permits."""

    # -- rollout side -------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Return how many more groups may be leased now, by the lead, the staleness bound and the end of the stream."""
        batch, lead = self._groups_per_version, self._max_staleness * self._groups_per_version
        if self.lead_groups is not None:
            lead = min(lead, self.lead_groups)  # the proof holds for any stricter admission
        bound = min((self.version + 1) * batch + lead, self._total_groups)
        return max(0, bound - self._trained - len(self._accepted) - len(self._running)) if self._open else 0

    def lease(self, count: int, *, replica: str, now_s: float) -> list[PromptLease]:
        """Lease up to ``count`` prompts to ``replica``: returned prompts first, oldest first, then new ones."""
        leases = []
        for _ in range(min(count, self.capacity())):
            number = self._pop_number()
            lease = PromptLease(self._next_lease, number, self.version, self.incarnation)
            self._next_lease += 1
            self._running[number] = _Leased(lease, replica, now_s + self._group_timeout_s)
            self._active_of[self.version] += 1
            leases.append(lease)
        return leases

    def complete(self, group: PromptGroup) -> bool:
        """Accept a finished group for training, or filter it; return True.

        Return False, and drop the group, if its lease is over or its weights do not fit the lease. Wrong weights also
        count as a failed attempt, see :meth:`fail`. Raises DataError after too many filtered groups in a row.
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
        self._failed_attempts.pop(group.sequence_number, None)
        self._skipped_in_a_row = 0
        if self._teaches is None or self._teaches(group):
            self._filtered_in_a_row = 0
            self._accepted[group.sequence_number] = (running.lease, group)
            self._finished_of[running.lease.version] += 1
        else:
            self._active_of[running.lease.version] -= 1
            self._filter(group)
        return True

    def _filter(self, group: PromptGroup) -> None:
        """Settle the prompt of ``group`` as filtered. Raise DataError after too many in a row."""
        self._filtered.add(group.sequence_number)
        self._untrained.filtered.append(group.sequence_number)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row > self._max_filtered_in_a_row:
            raise DataError(
                f"the last {self._filtered_in_a_row} groups taught nothing",
                why=f"algorithm.filter_groups found equal rewards in each; those of the last are {group.rewards[0]:g}",
                fix="use easier prompts if these rewards are low, harder ones if they are high; or a reward with more "
                "values, a larger rollout.n, a higher algorithm.max_filtered_in_a_row",
            )

    def _wrong_weights(self, group: PromptGroup, lease: PromptLease) -> str | None:
        """Return why the weights of ``group`` do not fit ``lease``; None if they fit.

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
        """Count a failed attempt; the prompt waits for another lease. After ``max_attempts`` of them it has failed.

        Ignores a lease that is over. Raises EngineError if more than ``max_skipped_in_a_row`` prompts fail without a
        finished group between them. The last of them is then still owed.
        """
        if not self._holds(lease):
            return
        self._failures += 1
        number = lease.sequence_number
        self._give_back(number)
        self._failed_attempts[number] = self._failed_attempts.get(number, 0) + 1
        if self._failed_attempts[number] >= self._max_attempts:
            self._skip(number, reason)

    def _skip(self, number: int, reason: str) -> None:
        """Settle a returned prompt as failed. Raise EngineError after too many in a row."""
        if self._skipped_in_a_row >= self._max_skipped_in_a_row:
            more = f", after {self._skipped_in_a_row} other failed prompts in a row" if self._skipped_in_a_row else ""
            raise EngineError(
                f"prompt {number} failed {self._max_attempts} times{more}",
                why=reason,
                fix="fix the cause in the reason; rollout.max_attempts sets the number of attempts, and "
                "rollout.on_failure=skip goes on without single prompts, up to rollout.max_skipped_in_a_row",
            )
        self._skipped_in_a_row += 1
        self._returned.remove(number)
        del self._failed_attempts[number]
        self._failed.add(number)
        self._untrained.failed[number] = reason

    def renew(self, leases: Iterable[PromptLease], *, now_s: float) -> None:
        """Restart the ``group_timeout_s`` of ``leases``, because they made progress. Ignores leases that are over."""
        for lease in leases:
            if self._holds(lease):
                self._running[lease.sequence_number].deadline_s = now_s + self._group_timeout_s

    def _holds(self, lease: PromptLease) -> bool:
        running = self._running.get(lease.sequence_number)
        return running is not None and running.lease == lease

    def forget_replica(self, replica: str) -> int:
        """Take back all leases of the lost ``replica``; return their number."""
        lost = [number for number, running in self._running.items() if running.replica == replica]
        for number in lost:
            self._give_back(number)
        return len(lost)

    def expire(self, now_s: float) -> list[str]:
        """Take back the leases without progress for ``group_timeout_s``; return the replicas that held them."""
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
        self._active_of, self._finished_of = +self._active_of, +self._finished_of  # without the versions at 0

    def take(self, count: int) -> list[PromptGroup] | None:
        """Return ``count`` groups to train on under the current version, oldest first; None if it is too early.

        Neither these groups nor the remaining ones will exceed the staleness bound.
        """
        if self._consumable(count) < count:
            return None
        chosen = sorted(self._accepted.values(), key=lambda pair: pair[0].lease_id)[:count]
        for lease, group in chosen:
            del self._accepted[group.sequence_number]
            self._finished_of[lease.version] -= 1
            self._active_of[lease.version] -= 1
        self._trained += count
        return [group for _, group in chosen]

    def take_untrained(self) -> UntrainedPrompts:
        """Return the prompts that were filtered or failed since the last call. A checkpoint keeps them, too."""
        taken, self._untrained = self._untrained, UntrainedPrompts()
        return taken

    def _consumable(self, count: int) -> int:
        """Return how many finished groups may be trained now, oldest first, up to ``count``.

        All other active groups keep a place before their deadlines. The cost depends only on the number of versions,
        because this is called for each finished group.
        """
        places, chosen = self._spare_places(), 0
        for version in places:  # ascending, as the leases are
            overtaken = [older for older in places if older < version]
            finished = self._finished_of[version]
            taken = min([finished, count - chosen, *(places[older] for older in overtaken)])
            for older in overtaken:
                places[older] -= taken
            chosen += taken
            if taken < finished:
                break
        return chosen

    def _spare_places(self) -> dict[int, int]:
        """Return, for each lease version, how many training places before its deadline no active group needs."""
        spare, older = {}, 0
        for version in sorted(version for version, active in self._active_of.items() if active):
            older += self._active_of[version]
            spare[version] = (version + self._max_staleness + 1) * self._groups_per_version - self._trained - older
        return spare

    # -- state --------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the number of prompts in each state, and running totals of three errors.

        ``accepted`` groups are finished and wait for training. ``returned`` prompts wait for another lease.
        ``failures`` counts failed attempts, while ``failed`` counts prompts. ``expired`` counts leases without
        progress, and ``rejected`` finished groups with tokens of wrong weights.
        """
        return {
            "trained": self._trained,
            "filtered": len(self._filtered),
            "failed": len(self._failed),
            "accepted": len(self._accepted),
            "running": len(self._running),
            "returned": len(self._returned),
            "failures": self._failures,
            "expired": self._expired,
            "rejected": self._rejected,
        }

    def state_of(self, number: int) -> PromptState:
        """Return the state of a prompt. Raises ValueError for a number that was never leased."""
        if not 0 <= number < self._next:
            raise ValueError(f"prompt {number} was never leased; the next new one is {self._next}")
        if number in self._filtered:
            return "filtered"
        if number in self._failed:
            return "failed"
        return "owed" if number in self._owed() else "trained"

    def _owed(self) -> set[int]:
        return {*self._returned, *self._running, *self._accepted}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as data for JSON. It tells the state of every prompt below ``next``.

        ``owed`` lists prompts. ``filtered`` and ``failed`` list ranges, each a first and a last prompt. All other
        prompts are trained; ``trained`` is their number. ``untrained`` is for the next :meth:`take_untrained`.

        The prompts of running and accepted groups are owed. After a resume they are generated again, because the old
        responses came from lost weights.
        """
        return {
            "version": self.version,
            "groups_per_version": self._groups_per_version,
            "trained": self._trained,
            "next": self._next,
            "owed": sorted(self._owed()),
            "filtered": self._filtered.ranges(),
            "failed": self._failed.ranges(),
            "untrained": {
                "filtered": to_ranges(self._untrained.filtered),
                "failed": list(self._untrained.failed.items()),  # JSON has no numbers as keys
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, incarnation: int) -> None:
        """Continue from :meth:`state_dict` with ``incarnation`` of the trainer. All earlier leases are over.

        Raises ConfigError, and changes nothing, if the state has another ``groups_per_version``, and DataError if it
        is malformed. The state of an earlier hwrl lacks this key. It may also lack those for filtered and failed
        prompts; it had none.
        """
        check_state(state)
        self._check_groups_per_version(state)
        self.version, self.incarnation = state["version"], incarnation
        self._open = False
        self._trained, self._next = state["trained"], state["next"]
        self._running.clear()
        self._accepted.clear()
        self._active_of.clear()
        self._finished_of.clear()
        self._failed_attempts.clear()
        self._returned = sorted(state["owed"])
        self._filtered, self._failed = NumberSet(), NumberSet()
        for first, last in state.get("filtered", []):
            self._filtered.add_range(first, last)
        for first, last in state.get("failed", []):
            self._failed.add_range(first, last)
        untrained = state.get("untrained", {"filtered": [], "failed": []})
        self._untrained = UntrainedPrompts(from_ranges(untrained["filtered"]), dict(untrained["failed"]))
        self._filtered_in_a_row = self._skipped_in_a_row = 0

    def _check_groups_per_version(self, state: Mapping[str, Any]) -> None:
        before = state.get("groups_per_version", self._groups_per_version)
        if before != self._groups_per_version:
            raise ConfigError(
                f"cannot resume with {self._groups_per_version} prompts for each weight version",
                why=f"the ledger of the checkpoint has {before}, and its versions and trained prompts were counted so",
                fix="resume with the old values of train.batch_groups and async_training.trigger_parameter_sync_step, "
                "or start a new run",
            )

    def _pop_number(self) -> int:
        if self._returned:
            return self._returned.pop(0)
        self._next += 1
        return self._next - 1

    def _give_back(self, number: int) -> None:
        self._active_of[self._running.pop(number).lease.version] -= 1
        self._returned.append(number)
        self._returned.sort()
