"""A simulated replica: continuous batching, without tokens.

All running responses get one token in each decoding step. So a replica's progress is counted in steps: a response of
``l`` tokens that starts at step ``p`` ends at step ``p + l``. Between two ends the number of running responses is
constant, and so is the duration of a step. The simulation jumps from one end to the next.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hwrl.rollout import LeaseQueue, PromptLease

_TOLERANCE_STEPS = 1e-6
"""Responses whose ends are closer than this end together."""


@dataclass(frozen=True)
class GeneratedGroup:
    """A group with complete responses: its total tokens, its longest response, the weight version at its start."""

    lease: PromptLease
    tokens: float
    longest: float
    version: int


class SimulatedReplica:
    """One process of a replica. All times are seconds of the simulation, and ``now_s`` never decreases.

    Up to ``slots`` responses run at once, in groups of ``group_size``. A decoding step takes ``latency_s`` seconds plus
    ``response_s`` for each running response.
    """

    def __init__(
        self,
        replica_id: str,
        leases: LeaseQueue,
        *,
        slots: int,
        group_size: int,
        latency_s: float,
        response_s: float,
        now_s: float,
    ) -> None:
        self.replica_id, self.leases = replica_id, leases
        self.version, self.incarnation = -1, -1
        self.alive, self.draining = True, False
        self.epoch = 0
        """The number of the newest scheduled event. An event of an older epoch is void, because it was rescheduled."""
        self._slots, self._group_size = slots, group_size
        self._latency_s, self._response_s = latency_s, response_s
        self._ends: NDArray[np.float64] = np.empty(0)
        self._times: NDArray[np.float64] | None = None  # seconds from the current step to each end; None: not computed
        self._groups: list[tuple[float, int, GeneratedGroup]] = []
        self._step, self._now_s, self._born_s = 0.0, now_s, now_s
        self._tokens = self._finished = self._generate_s = self._update_s = 0.0

    def pending(self) -> int:
        """Return the number of unfinished groups."""
        return len(self._groups)

    def held(self) -> list[PromptLease]:
        """Return all leases: those of unfinished groups, and those waiting for room."""
        return [*(group.lease for _, _, group in self._groups), *self.leases]

    def room(self) -> int:
        """Return how many groups can start now."""
        return (self._slots - len(self._ends)) // self._group_size

    def totals(self, now_s: float) -> dict[str, float]:
        """Return running totals like those of a real replica. A pause counts in full from its beginning.

        The idle time is that until ``now_s``, so it never decreases.
        """
        since_s = now_s - self._now_s  # negative: seconds that are left of a pause
        generate_s = self._generate_s
        if since_s > 0 and len(self._ends):
            generate_s += min(since_s, float(self._end_times()[-1]))
        paused_s = self._update_s + min(0.0, since_s)
        return {
            "tokens": self._tokens,
            "groups": self._finished,
            "generate_s": generate_s,
            "update_s": self._update_s,
            "idle_s": max(0.0, now_s - self._born_s - generate_s - paused_s),
        }

    def start(self, lease: PromptLease, lengths: NDArray[np.float64]) -> None:
        """Start a group whose responses have ``lengths`` tokens (float64). Call :meth:`advance` first."""
        group = GeneratedGroup(lease, float(lengths.sum()), float(lengths.max()), self.version)
        heapq.heappush(self._groups, (self._step + group.longest, lease.lease_id, group))
        self._ends = np.sort(np.concatenate([self._ends, self._step + lengths]))
        self._times = None

    def next_event_s(self, *, wants_room: bool) -> float | None:
        """Return when the next group ends; with ``wants_room``, also when a new group fits, if that is earlier.

        Returns None for an idle replica.
        """
        if not self._groups:
            return None
        index = int(self._ends.searchsorted(self._groups[0][0] - _TOLERANCE_STEPS))
        to_end = len(self._ends) + self._group_size - self._slots  # responses that must end before a group fits
        if wants_room and to_end > 0:
            index = min(index, to_end - 1)
        return self._now_s + float(self._end_times()[index])

    def advance(self, now_s: float) -> list[GeneratedGroup]:
        """Decode until ``now_s``; return the groups that have ended."""
        elapsed_s = now_s - self._now_s
        if elapsed_s <= 0:  # the replica pauses
            return []
        self._now_s = now_s
        if not len(self._ends):
            return []
        times = self._end_times()
        ended = int(times.searchsorted(elapsed_s + 1e-9, side="right"))
        before_s, step = (float(times[ended - 1]), float(self._ends[ended - 1])) if ended else (0.0, self._step)
        running = len(self._ends) - ended
        self._generate_s += min(elapsed_s, float(times[-1]))
        if running:
            step += max(0.0, elapsed_s - before_s) / (self._latency_s + self._response_s * running)
        self._step, self._ends = step, self._ends[ended:]
        self._times = None
        return self._pop_groups()

    def pause(self, seconds: float, *, now_s: float) -> None:
        """Pause for ``seconds`` to take new weights. Call :meth:`advance` first."""
        self._now_s = max(self._now_s, now_s) + seconds
        self._update_s += seconds

    def drop(self) -> None:
        """Drop all unfinished groups."""
        self._ends, self._groups = np.empty(0), []
        self._times = None

    def _pop_groups(self) -> list[GeneratedGroup]:
        groups = []
        while self._groups and self._groups[0][0] <= self._step + _TOLERANCE_STEPS:
            group = heapq.heappop(self._groups)[2]
            self._tokens += group.tokens
            self._finished += 1
            groups.append(group)
        return groups

    def _end_times(self) -> NDArray[np.float64]:
        """Return the seconds from the current step to each end (float64)."""
        if self._times is None:
            running = np.arange(len(self._ends), 0, -1)
            steps = self._ends.copy()
            steps[1:] -= self._ends[:-1]
            steps[:1] -= self._step
            self._times = (steps * (self._latency_s + self._response_s * running)).cumsum()
        return self._times
