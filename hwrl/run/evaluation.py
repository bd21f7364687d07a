"""The evaluations of a run, each divided among its replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from hwrl.errors import EngineError, HwrlError
from hwrl.run.config import Config
from hwrl.run.interrupts import Interrupts
from hwrl.run.remote import DEATH_ERRORS, Answer, Remote, is_ready, value_of
from hwrl.run.replica import Replica
from hwrl.run.report import Metrics, PlainView, RecordedView, StepRecorder

if TYPE_CHECKING:
    from hwrl.rollout import Evaluation
    from hwrl.run.fleet import Fleet
    from hwrl.run.progress import Progress

_TRIES = 3
"""The maximum number of attempts at one part."""
_LAST_TRIES = 3
"""The maximum number of attempts to evaluate the last weights."""


@dataclass
class _EvaluationPart:
    index: int
    tried_by: list[str] = field(default_factory=list)  # replica ids; the last one works on it if it has an answer
    answer: Answer[Evaluation | None] | None = None
    began_s: float = 0.0


class ShardedEvaluation:
    """An evaluation with one part of the prompts for each running replica that is not leaving.

    ``running`` returns the running replicas by replica id. ``staying`` returns the ids of those that are not leaving.
    ``alone``: no training goes on beside it.
    If a replica dies, its part goes to another one. After three attempts at a part the evaluation is lost. All of this
    happens in :meth:`poll`; call it repeatedly.
    """

    def __init__(
        self,
        running: Callable[[], Mapping[str, Remote[Replica]]],
        *,
        staying: Callable[[], Sequence[str]],
        limit_s: float,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._running, self._staying, self._limit_s = running, staying, limit_s
        self._parts = len(staying())
        self._open = [_EvaluationPart(index) for index in range(self._parts)]
        self._done: list[Evaluation] = []
        self._error: HwrlError | None = None
        self.poll()

    @property
    def answers(self) -> list[Answer[Evaluation | None]]:
        """The answers of the parts in progress. When one is ready, call :meth:`poll`."""
        return [part.answer for part in self._open if part.answer is not None]

    @property
    def is_over(self) -> bool:
        """Whether the evaluation has finished, failed, or is lost: :meth:`result` may be called."""
        return self._error is not None or not self._open or (self._is_lost and not self.answers)

    @property
    def _is_lost(self) -> bool:
        return any(part.answer is None and len(part.tried_by) >= _TRIES for part in self._open)

    def poll(self) -> None:
        """Collect finished parts, and start waiting ones on replicas without a part. Does not block."""
        running = self._running()
        for part in list(self._open):
            if part.answer is not None and is_ready(part.answer):
                self._take(part, part.answer)
            elif part.answer is not None and part.tried_by[-1] not in running:
                part.answer = None
        busy = {part.tried_by[-1] for part in self._open if part.answer is not None}
        for replica_id in [] if self._is_lost else [staying for staying in self._staying() if staying not in busy]:
            untried = (part for part in self._open if part.answer is None and replica_id not in part.tried_by)
            for part in islice(untried, 1):
                part.tried_by.append(replica_id)
                part.answer = running[replica_id].call(Replica.evaluate, part.index, self._parts, alone=self._alone)
                part.began_s = time.monotonic()

    def _take(self, part: _EvaluationPart, answer: Answer[Evaluation | None]) -> None:
        part.answer = None
        try:
            evaluation = value_of(answer)
        except (*DEATH_ERRORS, EngineError):  # the replica died, or its rollouter ended: another one does the part
            return
        except HwrlError as exc:
            self._error = exc
            return
        self._open.remove(part)
        self._done += [] if evaluation is None else [evaluation]

    def stuck(self) -> dict[str, str]:
        """Return the ids of the replicas that have exceeded the time limit for their part, with the reason as text."""
        now_s = time.monotonic()
        reason = f"its part of an evaluation was not finished within timeouts.evaluation_s={self._limit_s:g} s"
        return {
            part.tried_by[-1]: reason
            for part in self._open
            if part.answer is not None and now_s - part.began_s > self._limit_s and not is_ready(part.answer)
        }

    def result(self) -> Evaluation | None:
        """Return the joined result if :attr:`is_over`; None if the evaluation is lost. Raises the error of a part."""
        if self._error is not None:
            raise self._error
        if self._open:
            return None
        from hwrl.rollout import Evaluation

        return Evaluation.join(self._done)


class Evaluations:
    """Starts the evaluations of a run, one at a time, and adds their results to its metrics."""

    def __init__(self, config: Config, fleet: Fleet, recorder: StepRecorder, interrupts: Interrupts) -> None:
        self._config, self._fleet, self._recorder, self._interrupts = config, fleet, recorder, interrupts
        self._running: ShardedEvaluation | None = None
        self._evaluated: tuple[int, int] | None = None  # incarnation and version of the newest finished evaluation

    def begin(self, *, alone: bool = False) -> None:
        """Start an evaluation on the running replicas. Does nothing while an earlier one still runs."""
        if self._config.data.eval is not None and self._running is None:
            self._running = self._fleet.replicas.evaluate(alone=alone)

    def wait(self) -> Metrics | None:
        """Wait for a running evaluation or a signal; then return the result of :meth:`collect`.

        The trainers must be idle, because a replacement of a dead replica needs weights from them.
        """
        with self._fleet.waits.waiting_for("the evaluation"):
            while self._running is not None and not self._interrupts.pending:
                self._running.poll()
                if self._running.is_over:
                    break
                self._fleet.watch([])
                self._fleet.serve_new_receivers()
        return self.collect()

    def collect(self) -> Metrics | None:
        """Add a finished evaluation to the newest line and return the line; None without one. Does not block.

        The newest line may belong to a later step than the evaluated weights: ``eval/version`` has their version.
        """
        if self._running is None:
            return None
        self._running.poll()
        if not self._running.is_over:
            return None
        finished, self._running = self._running, None
        evaluation = finished.result()
        if evaluation is None:
            self._recorder.log("an evaluation was lost because its replicas died")
            return None
        if evaluation.incarnation != self._fleet.trainers.incarnation:
            self._recorder.log("an evaluation is discarded: its weights were lost in the restart of the trainer")
            return None
        self._evaluated = evaluation.incarnation, evaluation.version
        metrics = evaluation.metrics(pass_reward=self._config.eval.pass_reward)
        metrics = {f"eval/{name}": value for name, value in metrics.items()}
        return self._recorder.report.amend({**metrics, "eval/version": float(evaluation.version)})

    def evaluate_last(self, progress: Progress, view: PlainView | RecordedView) -> None:
        """Evaluate the weights of the last step, unless a regular evaluation has done so.

        If the evaluation is lost, another one starts, up to ``_LAST_TRIES`` in all.
        """
        if self._config.data.eval is None:
            return
        self.wait()
        newest = self._fleet.trainers.incarnation, progress.version
        if self._evaluated == newest and not progress.has_unpublished_weights:
            view.show(self._recorder.line)
            return
        if progress.has_unpublished_weights and not self._interrupts.pending:
            self._fleet.trainers.all.publish_last_weights()
        for _ in range(_LAST_TRIES):
            with self._fleet.waits.waiting_for("a replica for the evaluation"):
                while self._running is None and not self._interrupts.pending:
                    self.begin(alone=True)
                    if self._running is None:
                        self._fleet.watch([])
            line = self.wait()
            if line is not None:
                view.show(line)
            if line is not None or self._interrupts.pending:
                return
            self._fleet.watch([])  # the driver may learn of the replica's death a little after the loss
        self._recorder.log(f"the evaluation of the last weights failed {_LAST_TRIES} times; the run ends without it")
