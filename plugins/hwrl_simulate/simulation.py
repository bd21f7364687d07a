"""A discrete-event simulation of a run. The prompt ledger and its leases are real; the processes are simulated.

The simulated trainer does the same as :class:`~hwrl.run.loop.RunLoop`: advance the ledger, wait for a batch,
train, send the weights if they are due, save a checkpoint if it is due. Events of replicas happen in between.

A real run's stream of prompts ends, so its last steps have idle replicas. A simulated run stands for a part of a longer
run: its stream goes on beyond its last step.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hwrl.errors import EngineError
from hwrl.interfaces import PromptGroup
from hwrl.rollout import PromptLedger
from hwrl.run import Config, Metrics, make_ledger
from hwrl_simulate.events import EventQueue
from hwrl_simulate.fleet import SimulatedFleet
from hwrl_simulate.replica import SimulatedReplica
from hwrl_simulate.size import SimulatedSize
from hwrl_simulate.workload import Workload

TELL_S = 10.0
_STUCK_S = 3 * 86400.0
"""If this much simulated time passes without a new step, the run counts as stuck."""


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulation: lines of metrics as in ``metrics.jsonl``, the simulated time, and the failures.

    ``seconds`` includes the time of steps that were lost when the trainer died. It is the sum of ``perf/step_s``: the
    time of a step begins when the run had finished the step before for the first time. So the step in which the trainer
    died includes the restart, and the repetition of lost steps.
    """

    size: SimulatedSize
    lines: list[Metrics]
    seconds: float
    replica_deaths: int
    trainer_deaths: int
    lost_steps: int


def simulate(
    size: SimulatedSize, workload: Workload, *, seed: int = 0, log: Callable[[str], None] | None = None
) -> SimulatedRun:
    """Simulate a run to its last step. Raises an HwrlError if the real run would, such as for too many failures.

    ``log`` gets a line about the progress now and then.
    """
    with _no_garbage_collection():
        return _Simulation(size, workload, seed=seed).run(log)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector: millions of objects without cycles are made, and it took 25 % of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _endless_ledger(config: Config) -> PromptLedger:
    """Return a ledger whose stream of prompts does not end before the last step of ``config``, whatever the lead."""
    limits = config.async_training
    further = (limits.staleness_threshold + 1) * limits.trigger_parameter_sync_step
    return make_ledger(config, further_steps=further)


class _Simulation:
    def __init__(self, size: SimulatedSize, workload: Workload, *, seed: int) -> None:
        config = size.config
        self._size, self._config, self._workload = size, config, workload
        self._random = np.random.default_rng(seed)
        self._events = EventQueue()
        self._ledger = _endless_ledger(config)
        self._fleet = SimulatedFleet(
            config,
            workload,
            ledger=self._ledger,
            events=self._events,
            random=self._random,
            on_change=self._on_change,
        )
        self._lines: list[Metrics] = []
        self._step = self._saved_step = self._version = self._incarnation = 0
        self._saved = self._ledger.state_dict()
        self._trainer_epoch = 0  # an event that the trainer scheduled in an earlier epoch, before its death, is void
        self._waits_for: str | None = None  # "batch"; or "drain": the replicas finish their groups before a transfer
        self._draining: list[SimulatedReplica] = []
        self._since_s = 0.0
        self._trainer_deaths = self._lost_steps = 0
        self._step_s: list[float] = []  # from the first end of the step before to the first end of each step
        self._progress_s = 0.0
        self._metrics: Metrics = {}
        self._totals: dict[str, dict[str, float]] = {}  # of each replica, when the last line was written
        self._line_s = 0.0
        self._is_serving = False  # a transfer to new replicas is in progress

    def run(self, log: Callable[[str], None] | None) -> SimulatedRun:
        told_s = time.monotonic()
        for _ in range(self._config.rollout.replicas):
            self._fleet.add()
        self._ledger.load_state_dict(self._saved, incarnation=self._incarnation)
        self._deliver()
        self._schedule_failure()
        self._begin_step()
        while len(self._lines) < self._config.train.steps:
            if not self._events.run_next() or self._events.now_s - self._progress_s > _STUCK_S:
                raise self._stuck()
            if log is not None and time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                log(f"{self._size.devices:,} devices: step {len(self._lines)} of {self._config.train.steps}")
        return SimulatedRun(
            self._size,
            self._lines,
            self._events.now_s,
            self._fleet.deaths,
            self._trainer_deaths,
            self._lost_steps,
        )

    def _stuck(self) -> EngineError:
        days = (self._events.now_s - self._progress_s) / 86400
        return EngineError(
            f"the simulated run makes no progress after step {self._step}",
            why=f"no step was finished in {days:.0f} days; the trainer died {self._trainer_deaths} times and "
            f"replicas died {self._fleet.deaths} times, and the last checkpoint is of step {self._saved_step}",
            fix="assume a higher mtbf_h or a shorter restart_s, or save more often with checkpoint.save_every_steps",
        )

    def _after(self, seconds: float, act: Any) -> None:
        """Let the trainer call ``act`` after ``seconds``, unless it dies before."""
        epoch = self._trainer_epoch
        self._events.after(seconds, lambda: act() if epoch == self._trainer_epoch else None)

    # -- one step -------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._ledger.advance(self._version)
        self._waits_for, self._since_s = "batch", self._events.now_s
        self._fleet.serve()
        self._on_change()

    def _on_change(self) -> None:
        """Continue if the trainer waits for something that has now happened."""
        if self._waits_for == "drain":
            self._send_when_drained()
        elif self._waits_for == "batch":
            self._take_or_serve()

    def _take_or_serve(self) -> None:
        groups = self._ledger.take(self._config.train.batch_groups)
        if groups is not None:
            self._waits_for = None
            self._after(self._workload.batch_s, partial(self._train, groups))
        elif self._fleet.joiners and not self._is_serving:
            self._is_serving = True
            self._after(self._sync_s(), self._serve_new_receivers)

    def _serve_new_receivers(self) -> None:
        """Give new replicas their weights, while the trainer waits for a batch."""
        self._is_serving = False
        for replica in list(self._fleet.joiners):
            self._fleet.take_weights(replica, version=self._version, incarnation=self._incarnation)

    def _train(self, groups: list[PromptGroup]) -> None:
        rows = [self._fleet.rows.pop(group.lease_id) for group in groups]
        tokens, longest = sum(row[0] for row in rows), max(row[1] for row in rows)
        ages = [self._version - group.oldest_version for group in groups]
        spans = [group.newest_version - group.oldest_version for group in groups]
        work = self._workload
        token_s = work.train_token_s * (work.shared_train_ratio if self._size.shared else 1.0)
        train_s = work.train_fixed_s + token_s * max(tokens / self._config.train.ranks, longest)
        train_s *= math.exp(work.train_sigma * self._random.standard_normal() - work.train_sigma**2 / 2)
        self._metrics = {
            "response/length_mean": tokens / len(groups) / self._config.rollout.n,
            "response/length_max": longest,
            "response/tokens": tokens,
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": float(max(ages)),
            "partial/ratio": sum(span > 0 for span in spans) / len(spans),
            "timing_s/wait": self._events.now_s - self._since_s,
            "timing_s/train": train_s,
            "timing_s/sync": 0.0,
        }
        self._after(train_s, self._end_training)

    def _end_training(self) -> None:
        self._step += 1
        if self._step % self._config.async_training.trigger_parameter_sync_step:
            self._finish_step()
            return
        self._since_s = self._events.now_s
        if self._config.async_training.partial_rollout:
            self._send()
        else:
            self._draining = list(self._fleet.replicas.values())
            for replica in self._draining:
                replica.draining = True
            self._waits_for = "drain"
            self._send_when_drained()

    def _send_when_drained(self) -> None:
        while self._draining and not (self._draining[-1].alive and self._draining[-1].pending()):
            self._draining.pop()
        if not self._draining:
            self._waits_for = None
            self._send()

    def _send(self) -> None:
        seconds = self._sync_s() + (self._workload.switch_s if self._size.shared else 0.0)
        self._metrics |= {
            "sync/nbytes": self._workload.sync_nbytes,
            "sync/receivers": float(len(self._fleet.replicas)),
        }
        self._after(seconds, self._end_sync)

    def _sync_s(self) -> float:
        work = self._workload
        moved_s = work.sync_nbytes / (work.bandwidth * self._size.senders)
        return work.sync_fixed_s + moved_s + work.sync_replica_s * len(self._fleet.replicas)

    def _end_sync(self) -> None:
        self._metrics["timing_s/sync"] = self._events.now_s - self._since_s
        self._version += 1
        self._deliver()
        self._finish_step()

    def _deliver(self) -> None:
        for replica in list(self._fleet.replicas.values()):
            self._fleet.take_weights(replica, version=self._version, incarnation=self._incarnation)

    def _finish_step(self) -> None:
        line = {"step": self._step, "time_s": self._events.now_s, "weights/version": float(self._version)}
        line = {**line, **self._metrics, **self._rates()}
        if self._step > len(self._step_s):
            self._step_s.append(self._events.now_s - self._progress_s)
            self._progress_s = self._events.now_s
        self._lines.append({**line, "perf/step_s": self._step_s[self._step - 1]})
        pause_s = self._workload.overhead_s
        every = self._config.checkpoint.save_every_steps
        if every and self._step % every == 0:
            pause_s += self._workload.checkpoint_s
            self._saved, self._saved_step = self._ledger.state_dict(), self._step
        self._after(pause_s, self._begin_step)

    def _rates(self) -> Metrics:
        """Return the ledger's counts, and what the replicas have done since the last line, under a real run's names."""
        now_s = self._events.now_s
        elapsed_s, self._line_s = max(now_s - self._line_s, 1e-9), now_s
        totals = {name: replica.totals(now_s) for name, replica in self._fleet.replicas.items()}
        added: Counter[str] = Counter()
        for name, total in totals.items():
            before = self._totals.get(name, {})
            added.update({key: value - before.get(key, 0.0) for key, value in total.items()})
        self._totals = totals
        filtered = len(self._ledger.take_untrained().filtered)
        return {
            **{f"ledger/{name}": float(value) for name, value in self._ledger.counts().items()},
            "groups/filtered_ratio": filtered / (filtered + self._config.train.batch_groups),
            "rollout/tokens_per_s": added["tokens"] / elapsed_s,
            "rollout/replicas": float(len(totals)),
            **{f"rollout/{name}": added[name] for name in ("idle_s", "generate_s", "update_s")},
        }

    # -- failures -------------------------------------------------------------------------------------------------

    def _schedule_failure(self) -> None:
        mean_s = 3600 * self._workload.mtbf_h / self._size.devices
        self._events.after(float(self._random.exponential(mean_s)), self._fail)

    def _fail(self) -> None:
        """Let one device fail. The trainer or a replica dies with it, or hangs."""
        self._schedule_failure()
        hangs = self._random.random() < self._workload.hang_ratio
        device = self._random.integers(self._size.devices)
        if device < self._config.train.ranks:
            self._end_trainer(self._config.timeouts.heartbeat_s if hangs else 0.0)
        elif self._fleet.replicas:
            names = list(self._fleet.replicas)
            replica = self._fleet.replicas[names[int(self._random.integers(len(names)))]]
            self._fleet.hang(replica) if hangs else self._fleet.crash(replica)
            self._on_change()

    def _end_trainer(self, detect_s: float) -> None:
        """End the trainer. After ``detect_s`` and the restart it continues from its last checkpoint."""
        self._trainer_epoch += 1
        self._trainer_deaths += 1
        self._waits_for, self._is_serving = None, False
        self._after(detect_s + self._workload.restart_s, self._restart_trainer)

    def _restart_trainer(self) -> None:
        self._incarnation += 1
        self._lost_steps += self._step - self._saved_step
        self._step = self._saved_step
        del self._lines[self._step :]
        self._ledger.load_state_dict(self._saved, incarnation=self._incarnation)
        self._version = self._step // self._config.async_training.trigger_parameter_sync_step
        self._fleet.rows.clear()
        self._after(self._sync_s(), self._resume)

    def _resume(self) -> None:
        self._deliver()
        self._begin_step()
