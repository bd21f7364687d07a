"""The simulated replicas of a run, and their dealings with the ledger: leases, finished groups, deaths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from hwrl.interfaces import PromptGroup
from hwrl.rollout import LeaseQueue, PromptLease, PromptLedger
from hwrl.run import Config
from hwrl_simulate.events import EventQueue
from hwrl_simulate.replica import GeneratedGroup, SimulatedReplica
from hwrl_simulate.workload import Lengths, Workload, longest_response

_PROMPT = np.zeros(1, dtype=np.int32)
_ONES, _SAMPLES = np.ones(2, dtype=np.int32), np.arange(2, dtype=np.int32)
_TRUE, _FALSE = np.ones(2, dtype=np.bool_), np.zeros(2, dtype=np.bool_)
_LOGPROBS = np.zeros(2, dtype=np.float32)


class SimulatedLedger:
    """The ledger as one replica calls it. A request waits in a queue until the ledger has capacity."""

    def __init__(self, fleet: SimulatedFleet, replica_id: str) -> None:
        self._fleet, self._replica_id = fleet, replica_id

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Request up to ``count`` leases."""
        return self._fleet.request(count, self._replica_id)

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups."""
        for group in groups:
            self._fleet.ledger.complete(group)

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report a failed attempt at a prompt."""
        self._fleet.ledger.fail(lease, reason=reason)

    def renew(self, leases: Sequence[PromptLease]) -> None:
        """Report progress on ``leases``."""
        self._fleet.ledger.renew(leases, now_s=self._fleet.events.now_s)


class SimulatedFleet:
    """All replicas of a simulated run. They lease from the run's :class:`PromptLedger` as real replicas do.

    ``on_change`` is called after a group has been handed in, and after a new replica has started.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        *,
        ledger: PromptLedger,
        events: EventQueue,
        random: np.random.Generator,
        on_change: Callable[[], None],
    ) -> None:
        self.ledger, self.events = ledger, events
        self._config, self._workload, self._random, self._on_change = config, workload, random, on_change
        lengths = Lengths.with_mean(workload.mean_tokens, sigma=workload.sigma, limit=longest_response(config))
        self._lengths = lengths.groups(config.rollout.n, np.random.default_rng(random.integers(1 << 31)))
        self.replicas: dict[str, SimulatedReplica] = {}
        self.joiners: set[SimulatedReplica] = set()
        """The new replicas, which have no weights yet."""
        self._requests: deque[tuple[int, str, Future[list[PromptLease]]]] = deque()
        self._starts = 0
        self.deaths = 0
        self.rows: dict[int, tuple[float, float]] = {}
        """The total tokens and the longest response of each finished group, by lease id."""

    # -- start and end ------------------------------------------------------------------------------------------

    def add(self) -> SimulatedReplica:
        """Start a replica. It has no weights yet."""
        replica_id, self._starts = f"replica#{self._starts}", self._starts + 1
        latency_s = self._workload.full_step_s * self._workload.latency_share
        slots = self._config.rollout.max_running
        replica = self.replicas[replica_id] = SimulatedReplica(
            replica_id,
            LeaseQueue(SimulatedLedger(self, replica_id)),
            slots=slots,
            group_size=self._config.rollout.n,
            latency_s=latency_s,
            response_s=(self._workload.full_step_s - latency_s) / slots,
            now_s=self.events.now_s,
        )
        self.joiners.add(replica)
        return replica

    def crash(self, replica: SimulatedReplica) -> None:
        """End a replica. Its prompts go to others at once."""
        self._stop(replica)
        self._replace(replica)

    def hang(self, replica: SimulatedReplica) -> None:
        """Stop a replica without notice. Its leases expire after ``rollout.group_timeout_s``, and it is replaced."""
        for group in replica.advance(self.events.now_s):
            self._hand_in(replica, group)
        self.ledger.renew(replica.held(), now_s=self.events.now_s)
        self._stop(replica)
        self.events.after(self._config.rollout.group_timeout_s, partial(self._expire, replica))

    def _stop(self, replica: SimulatedReplica) -> None:
        replica.alive = False
        replica.epoch += 1
        self.replicas.pop(replica.replica_id, None)
        self.joiners.discard(replica)
        self._requests = deque(request for request in self._requests if request[1] != replica.replica_id)

    def _expire(self, replica: SimulatedReplica) -> None:
        """Renew the leases of all living replicas, as real ones do every second, and expire the other leases."""
        for other in self.replicas.values():
            self.ledger.renew(other.held(), now_s=self.events.now_s)
        self.ledger.expire(self.events.now_s)
        self._replace(replica)

    def _replace(self, replica: SimulatedReplica) -> None:
        self.deaths += 1
        self.ledger.forget_replica(replica.replica_id)
        self.events.after(self._workload.restart_s, self._join)
        self.serve()

    def _join(self) -> None:
        self.add()
        self._on_change()

    # -- weights --------------------------------------------------------------------------------------------------

    def take_weights(self, replica: SimulatedReplica, *, version: int, incarnation: int) -> None:
        """Give a replica new weights. If they come from a new incarnation of the trainer, drop all its work."""
        if not replica.alive:
            return
        self.joiners.discard(replica)
        self.settle(replica)
        replica.pause(self._workload.update_s, now_s=self.events.now_s)
        if replica.incarnation != incarnation:
            replica.drop()
            replica.leases.drop_older(incarnation=incarnation)
        replica.version, replica.incarnation, replica.draining = version, incarnation, False
        self.turn(replica)

    # -- prompts --------------------------------------------------------------------------------------------------

    def request(self, count: int, replica_id: str) -> Future[list[PromptLease]]:
        """Request leases for a replica. Requests are answered in their order."""
        answer: Future[list[PromptLease]] = Future()
        if self._requests or not self.ledger.capacity():
            self._requests.append((count, replica_id, answer))
        else:
            answer.set_result(self.ledger.lease(count, replica=replica_id, now_s=self.events.now_s))
        return answer

    def serve(self) -> None:
        """Answer waiting requests as long as the ledger admits groups, and let their replicas work."""
        while self._requests and self.ledger.capacity():
            count, replica_id, answer = self._requests.popleft()
            answer.set_result(self.ledger.lease(count, replica=replica_id, now_s=self.events.now_s))
            replica = self.replicas[replica_id]
            self.settle(replica)
            self.turn(replica)

    def turn(self, replica: SimulatedReplica) -> None:
        """Start leased prompts as in one turn of a real replica's loop, and schedule the next event."""
        while replica.version >= 0 and not replica.draining:
            replica.leases.refill(room=replica.room())
            ready = replica.leases.pop_ready(version=replica.version, incarnation=replica.incarnation)
            if not ready:
                break
            for lease in ready:
                replica.start(lease, next(self._lengths))
        replica.epoch += 1
        next_s = replica.next_event_s(wants_room=not replica.draining)
        if next_s is not None:
            self.events.at(next_s, partial(self._event, replica, replica.epoch))

    def _event(self, replica: SimulatedReplica, epoch: int) -> None:
        if epoch != replica.epoch:
            return
        self.settle(replica)
        self.turn(replica)

    def settle(self, replica: SimulatedReplica) -> None:
        """Let a replica generate until now. Groups that have finished are scored and handed in."""
        for group in replica.advance(self.events.now_s):
            if self._workload.reward_s:
                self.events.after(self._workload.reward_s, partial(self._hand_in, replica, group))
            else:
                self.events.at(self.events.now_s, partial(self._hand_in, replica, group))

    def _hand_in(self, replica: SimulatedReplica, group: GeneratedGroup) -> None:
        if self._workload.failed_ratio and self._random.random() < self._workload.failed_ratio:
            self.ledger.fail(group.lease, reason="a simulated failure (failed_ratio)")
        elif self.ledger.complete(self._prompt_group(replica, group)):
            self.rows[group.lease.lease_id] = (group.tokens, group.longest)
        self._on_change()
        self.serve()

    def _prompt_group(self, replica: SimulatedReplica, group: GeneratedGroup) -> PromptGroup:
        """Return a group with two rows of one token: one by the oldest weights of the group, one by the newest."""
        equal = self._workload.equal_ratio and self._random.random() < self._workload.equal_ratio
        return PromptGroup(
            sequence_number=group.lease.sequence_number,
            lease_id=group.lease.lease_id,
            incarnation=group.lease.incarnation,
            prompt_ids=_PROMPT,
            token_ids=_ONES,
            logprobs=_LOGPROBS,
            versions=np.array([group.version, max(group.version, replica.version)], dtype=np.int32),
            loss_mask=_TRUE,
            lengths=_ONES,
            samples=_SAMPLES,
            rewards=np.array([0.0, 0.0 if equal else 1.0], dtype=np.float32),
            truncated=_FALSE,
        )
