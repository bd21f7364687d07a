"""The ways of ``hwrl bench ledger``: hwrl's ledger and Ray's queue, with the processes that hand groups in."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.queue import Empty, Full, Queue

from hwrl.interfaces import PromptGroup
from hwrl.rollout import PromptLease
from hwrl.run import Config, LedgerActor, Remote, start_ledger
from hwrl_bench.ways import Way

_PAUSE_S = 0.001
"""The wait before another try at a full or an empty queue: its calls for many groups do not wait."""


@dataclass(frozen=True)
class WayOptions:
    """The work of both ways: ``replicas`` processes, ``call`` groups in a call, ``responses`` of ``tokens`` tokens."""

    config: Config
    replicas: int
    call: int
    responses: int
    tokens: int

    def template(self) -> PromptGroup:
        """Return a group to copy."""
        count = self.responses * self.tokens
        return PromptGroup(
            sequence_number=0,
            lease_id=0,
            incarnation=0,
            prompt_ids=np.zeros(self.tokens, dtype=np.int32),
            token_ids=np.arange(count, dtype=np.int32),
            logprobs=np.zeros(count, dtype=np.float32),
            versions=np.zeros(count, dtype=np.int32),
            loss_mask=np.ones(count, dtype=np.bool_),
            lengths=np.full(self.responses, self.tokens, dtype=np.int32),
            samples=np.arange(self.responses, dtype=np.int32),
            rewards=np.arange(self.responses, dtype=np.float32),
            truncated=np.zeros(self.responses, dtype=np.bool_),
        )


class GroupWay(Way, ABC):
    """Brings groups from replicas to this process, through a process of its own: ``pid``."""

    def __init__(self, options: WayOptions, service: Any) -> None:
        self._replicas = [
            ray.remote(num_cpus=0)(_GroupFeeder).remote(service, options, f"replica-{number}#0")
            for number in range(options.replicas)
        ]

    pid: int

    def begin(self, groups: int) -> Callable[[], list[float]]:
        """Let the replicas hand in ``groups`` groups; the returned function waits, and returns the calls' seconds."""
        ends = [groups * number // len(self._replicas) for number in range(len(self._replicas) + 1)]
        shares = [end - begin for begin, end in pairwise(ends)]
        answers = [replica.run.remote(share) for replica, share in zip(self._replicas, shares, strict=True)]
        return lambda: [seconds for part in ray.get(answers) for seconds in part]

    @abstractmethod
    def take(self, count: int) -> list[PromptGroup]:
        """Wait for the next ``count`` groups, and return them."""

    def resident_nbytes(self) -> int:
        """Return the resident host memory of the way's own process."""
        pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="utf-8").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the replicas."""
        for replica in self._replicas:
            ray.kill(replica)


class LedgerWay(GroupWay):
    """A run's ledger: replicas lease prompts, and the trainer takes a batch for each version."""

    def __init__(self, options: WayOptions) -> None:
        self._ledger = start_ledger(options.config)
        super().__init__(options, _LedgerService(self._ledger))
        self.pid = ray.get(self._ledger.pid())
        self._version = 0

    def take(self, count: int) -> list[PromptGroup]:
        groups, _ = self._ledger.call_for_two(LedgerActor.advance_and_take, count, self._version)
        self._version += 1
        taken: list[PromptGroup] = ray.get(groups)
        return taken

    def close(self) -> None:
        super().close()
        self._ledger.kill()


def queue_size(config: Config, call: int) -> int:
    """Return how many groups the queue may hold: as many as the ledger.

    It holds more if ``call`` groups would not fit beside less than a batch. Else trainer and replicas wait for ever.
    """
    batch = config.groups_per_version
    return max((config.async_training.staleness_threshold + 1) * batch, batch - 1 + call)


class QueueWay(GroupWay):
    """``ray.util.queue.Queue`` with :func:`queue_size`."""

    def __init__(self, options: WayOptions) -> None:
        self._queue = Queue(maxsize=queue_size(options.config, options.call), actor_options={"num_cpus": 0})
        super().__init__(options, _QueueService(self._queue))
        self.pid = ray.get(self._queue.actor.__ray_call__.remote(lambda actor: os.getpid()))

    def take(self, count: int) -> list[PromptGroup]:
        while True:
            try:
                groups: list[PromptGroup] = self._queue.get_nowait_batch(count)
                return groups
            except Empty:
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        super().close()
        self._queue.shutdown(force=True)


GROUP_WAYS: dict[str, Callable[[WayOptions], GroupWay]] = {"hwrl ledger": LedgerWay, "ray.util.queue": QueueWay}


# -- in the process of a replica --------------------------------------------------------------------------------------


class _LedgerService:
    """The ledger for a replica."""

    def __init__(self, ledger: Remote[LedgerActor]) -> None:
        self._ledger = ledger

    def lease(self, count: int, replica: str) -> list[PromptLease]:
        leases: list[PromptLease] = ray.get(self._ledger.call(LedgerActor.lease, count, replica))
        return leases

    def hand_in(self, groups: list[PromptGroup], replica: str) -> bool:
        ray.get(self._ledger.call(LedgerActor.complete, groups, replica, {}))
        return True


class _QueueService:
    """The queue for a replica: each lease is there at once, and stands for nothing."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def lease(self, count: int, replica: str) -> list[PromptLease]:
        return [PromptLease(0, 0, 0, 0)] * count

    def hand_in(self, groups: list[PromptGroup], replica: str) -> bool:
        try:
            self._queue.put_nowait_batch(groups)
        except Full:
            return False
        return True


class _GroupFeeder:
    """Stands in for a replica: hands in copies of one group, and generates nothing."""

    def __init__(self, service: Any, options: WayOptions, replica: str) -> None:
        self._service, self._call, self._replica = service, options.call, replica
        self._template = options.template()

    def run(self, groups: int) -> list[float]:
        """Hand in ``groups`` groups; return the seconds of each call that did."""
        seconds: list[float] = []
        while groups:
            leases = self._service.lease(min(self._call, groups), self._replica)
            if leases:
                seconds.append(self._hand_in([self._finished(lease) for lease in leases]))
                groups -= len(leases)
        return seconds

    def _hand_in(self, groups: list[PromptGroup]) -> float:
        while True:
            began_s = time.perf_counter()
            if self._service.hand_in(groups, self._replica):
                return time.perf_counter() - began_s
            time.sleep(_PAUSE_S)

    def _finished(self, lease: PromptLease) -> PromptGroup:
        versions = np.full_like(self._template.versions, lease.version)
        return replace(
            self._template, sequence_number=lease.sequence_number, lease_id=lease.lease_id, versions=versions
        )
