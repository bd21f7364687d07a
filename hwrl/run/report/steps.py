"""Record the finished steps of a run: metrics of the time between two steps, traces of prompts, and the report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hwrl.interfaces import PromptTrace, RunStatus, Span
from hwrl.run.config import Config
from hwrl.run.report.bottleneck import BATCH_WAIT, BUSY_SECONDS, busy_shares
from hwrl.run.report.records import Metrics
from hwrl.run.report.run_report import RunReport
from hwrl.run.report.summary import unknown_goals
from hwrl.run.report.trackers import start_trackers

if TYPE_CHECKING:
    from hwrl.run.cluster.placement import DeviceCounts
    from hwrl.run.fleet import Fleet
    from hwrl.run.ledger import BatchInfo
    from hwrl.run.trainer import StepOutcome

WINDOW_STEPS = 20
"""Steps over which ``perf/bottleneck`` is computed. One step is too short, as it may cut through a replica's work."""
COUNTS = ("received_nbytes", "base_loads", "sleeps", "freed_nbytes")


class StepRates:
    """Turns the replicas' running totals into metrics of the time since the last step.

    ``history`` has the lines of the run before a resume.
    """

    def __init__(self, history: list[Metrics], *, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last_totals: dict[str, dict[str, float]] = {}
        self._window: deque[Metrics] = deque(maxlen=WINDOW_STEPS)
        self._rollout_idle_ratio = 0.0
        self.go_back(history)

    def start_clock(self) -> None:
        """Start the first interval now. Call this when every process is ready."""
        self._last_s = self._now()

    def go_back(self, history: list[Metrics]) -> None:
        """Set the number of trained tokens back to the end of ``history``, after the trainer has restarted.

        The replicas keep their totals when the trainer returns to a checkpoint. So the next rates cover the time since
        the last call of :meth:`metrics` (before the first call: since now), recovery included. That line therefore has
        no ``perf/step_s`` and no metrics derived from it. Undone steps no longer count for ``perf/bottleneck``.
        """
        self._window.clear()
        self._recovered = bool(self._last_totals)
        self._trained_tokens = history[-1].get("response/tokens_total", 0.0) if history else 0.0
        if not self._last_totals:
            self.start_clock()

    def metrics(self, trained: Metrics, batch: BatchInfo, *, devices: DeviceCounts) -> Metrics:
        """Return the rates since the last call. ``trained`` has the trainer's metrics of the step on ``batch``.

        ``devices`` has the number of devices of each side.
        """
        now_s = self._now()
        elapsed_s, self._last_s = max(now_s - self._last_s, 1e-9), now_s
        rollout = self._added_since_last(batch.replicas)
        if rollout.get("idle_s", 0.0) + _busy_s(rollout) > 0:  # otherwise no replica has reported since the last step
            self._rollout_idle_ratio = rollout["idle_s"] / (rollout["idle_s"] + _busy_s(rollout))
        self._trained_tokens += trained["response/tokens"]
        trainer_s = sum(value for name, value in trained.items() if name.startswith("timing_s/"))
        metrics = {
            **{f"ledger/{name}": float(value) for name, value in batch.counts.items()},
            **_untrained(batch),
            "response/tokens_total": self._trained_tokens,
            "trainer/tokens_per_s": trained["response/tokens"] / elapsed_s,
            "trainer/idle_ratio": trained["timing_s/wait"] / max(trainer_s, 1e-9),
            "rollout/tokens_per_s": rollout.get("tokens", 0.0) / elapsed_s,
            "rollout/idle_ratio": self._rollout_idle_ratio,
            "rollout/reward_errors": rollout.get("reward_errors", 0.0),
            "rollout/replicas": float(len(batch.replicas)),
            **{f"rollout/{name}": rollout[name] for name in ("idle_s", *BUSY_SECONDS, *COUNTS) if name in rollout},
        }
        if not self._recovered:
            metrics["perf/step_s"] = elapsed_s
            metrics["perf/tokens_per_s_per_device"] = trained["response/tokens"] / elapsed_s / devices.distinct
        self._recovered = False
        if busy_s := _busy_s(rollout):
            per_replica = rollout.get("tokens", 0.0) / busy_s
            metrics["perf/rollout_tokens_per_s_per_device"] = per_replica * len(batch.replicas) / devices.rollout
        self._window.append({**trained, **metrics})
        shares = busy_shares(self._window)
        return metrics if shares is None else {**metrics, "perf/bottleneck": shares.code}

    def _added_since_last(self, replicas: dict[str, dict[str, float]]) -> dict[str, float]:
        """Return the growth of each total since the last step, summed over the replicas."""
        sums: dict[str, float] = {}
        for replica, totals in replicas.items():
            before = self._last_totals.get(replica, {})
            for name, value in totals.items():
                sums[name] = sums.get(name, 0.0) + value - before.get(name, 0.0)
        self._last_totals = replicas
        return sums


def _busy_s(totals: dict[str, float]) -> float:
    return sum(totals.get(name, 0.0) for name in BUSY_SECONDS)


def _untrained(batch: BatchInfo) -> Metrics:
    """Return the numbers of prompts that were filtered or failed since the last batch."""
    filtered = len(batch.untrained.filtered)
    return {
        "groups/filtered": float(filtered),
        "groups/filtered_ratio": filtered / max(1, filtered + len(batch.sequence_numbers)),
        "groups/failed": float(len(batch.untrained.failed)),
    }


def finish_traces(
    spans: Mapping[int, Sequence[Span]],
    trained: Metrics,
    *,
    step: int,
    every: int,
    begin_unix_s: float,
    end_unix_s: float,
) -> Iterator[PromptTrace]:
    """Yield the trace of each traced prompt of a step. ``spans`` has the replicas' spans by sequence number.

    One step in ``every`` sends a version of the weights. ``trained`` has the trainer's metrics of this step: how long
    the transfer took, and the critic's training after it. The span ``batch`` lasts from the end of the rollout to the
    start of the step. If the machines' clocks differ by more than this time, its length is 0.
    """
    attributes = {"step": step, "version": (step - 1) // every}
    for number, before in spans.items():
        handed_in_unix_s = min(max(span.end_unix_s for span in before), begin_unix_s)
        after = [Span("batch", handed_in_unix_s, begin_unix_s), Span("step", begin_unix_s, end_unix_s, attributes)]
        if step % every == 0:
            sent_unix_s = end_unix_s - trained.get("timing_s/critic", 0.0)
            began_unix_s = max(begin_unix_s, sent_unix_s - trained.get("timing_s/sync", 0.0))
            after.append(Span("version", began_unix_s, sent_unix_s, {"version": step // every}))
        ordered = sorted(before, key=lambda span: span.begin_unix_s)
        yield PromptTrace(number, step, (*ordered, *after), attributes)


class StepRecorder:
    """Writes the report of a run, step by step. ``open`` starts it, and starts it again after a return to a checkpoint.

    Use :attr:`report` for what is not a finished step.
    """

    def __init__(self, config: Config, *, log: Callable[[str], None]) -> None:
        self._config, self.log = config, log
        self._opened: RunReport | None = None
        self._rates = StepRates([])
        self._has_goals_checked = False

    @property
    def report(self) -> RunReport:
        """The open report."""
        assert self._opened is not None, "open comes first"
        return self._opened

    @property
    def line(self) -> Metrics:
        """The newest line."""
        return self.report.history[-1]

    def open(self, step: int) -> None:
        """Open the report after ``step``. A report of the time before a trainer's death is closed as "interrupted".

        Its trackers see the rest as a resumed run.
        """
        earlier = () if self._opened is None else self._opened.trackers
        if self._opened is not None:
            self._opened.close("interrupted", waits=False)
        self._opened = RunReport(
            self._config.dir,
            log=self.log,
            resume_step=step,
            trackers=start_trackers(self._config, resume_step=step, log=self.log, earlier=earlier),
        )
        self._rates.go_back(self._opened.history)

    def start_clock(self) -> None:
        """Start to count the time of training: every process is ready."""
        self.report.start_clock()
        self._rates.start_clock()

    @contextmanager
    def waiting_for_batch(self) -> Iterator[None]:
        """Count the seconds of the block as the wait for the next step's batch. The step begins at its end."""
        requested_s = time.perf_counter()
        yield
        self._began_unix_s, self._waited_s = time.time(), time.perf_counter() - requested_s

    def add(self, step: int, outcome: StepOutcome, batch: BatchInfo, *, fleet: Fleet) -> None:
        """Record the finished ``step`` on ``batch``."""
        for number, reason in list(batch.untrained.failed.items())[:1]:
            others = (
                f"; {len(batch.untrained.failed) - 1} more failed as well" if len(batch.untrained.failed) > 1 else ""
            )
            self.log(f"prompt {number} failed and is skipped ({reason}){others}")
        rates = self._rates.metrics(outcome.metrics, batch, devices=fleet.device_counts)
        rates[BATCH_WAIT] = self._waited_s
        rates["rollout/deaths"] = float(fleet.replicas.deaths.total())
        self.report.add(
            step,
            {**outcome.metrics, **rates},
            prompts=batch.sequence_numbers,
            untrained=batch.untrained,
            samples=outcome.samples,
        )
        if not self._has_goals_checked:
            self._has_goals_checked = True
            sets = [data_set.name for data_set in self._config.data.eval_sets]
            for sentence in unknown_goals(self._config.goals, self.line, eval_sets=sets):
                self.log(sentence)
        if batch.spans:
            traces = finish_traces(
                batch.spans,
                outcome.metrics,
                step=step,
                every=self._config.async_training.trigger_parameter_sync_step,
                begin_unix_s=self._began_unix_s,
                end_unix_s=time.time(),
            )
            self.report.trace(list(traces))

    def close(self, status: RunStatus) -> None:
        """Finish the trackers with ``status``, and close the files; nothing if no report is open."""
        if self._opened is not None:
            self._opened.close(status)
