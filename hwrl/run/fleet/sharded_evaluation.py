"""One evaluation, divided among the replicas of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hwrl.errors import EngineError, HwrlError
from hwrl.run.processes.answers import DEATH_ERRORS, Answer, is_ready, value_of
from hwrl.run.processes.handles import ReplicaHandle

if TYPE_CHECKING:
    from hwrl.rollout import Evaluation

_TRIES = 3
"""The maximum number of attempts at one part."""


@dataclass
class _EvaluationPart:
    index: int
    tried_by: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _StartedPart:
    part: _EvaluationPart
    answer: Answer[Evaluation | None]
    began_s: float


class ShardedEvaluation:
    """An evaluation with one part of the prompts for each running replica that is not leaving.

    ``running`` returns the running replicas by replica id. ``staying`` returns the ids of those that are not leaving.
    ``alone``: no training goes on beside it.
    If a replica dies, its part goes to another one. After three attempts at a part the evaluation is lost. All of this
    happens in :meth:`poll`; call it repeatedly.
    """

    def __init__(
        self,
        running: Callable[[], Mapping[str, ReplicaHandle]],
        *,
        staying: Callable[[], Sequence[str]],
        limit_s: float,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._running, self._staying, self._limit_s = running, staying, limit_s
        self._parts = len(staying())
        self._waiting = [_EvaluationPart(index) for index in range(self._parts)]
        self._working: dict[str, _StartedPart] = {}
        self._done: list[Evaluation] = []
        self._lost = False
        self._error: HwrlError | None = None
        self.poll()

    @property
    def answers(self) -> list[Answer[Evaluation | None]]:
        """The answers of the parts in progress. When one is ready, call :meth:`poll`."""
        return [work.answer for work in self._working.values()]

    @property
    def is_over(self) -> bool:
        """Whether the evaluation has finished, failed, or is lost: :meth:`result` may be called."""
        return self._error is not None or not (self._working or (self._waiting and not self._lost))

    @property
    def is_stalled(self) -> bool:
        """Whether a part waits for a replica, and no other part is in progress."""
        return bool(self._waiting) and not self._working

    def poll(self) -> None:
        """Collect finished parts, and start waiting ones on replicas without a part. Does not block."""
        running = self._running()
        for replica_id, work in list(self._working.items()):
            if is_ready(work.answer):
                del self._working[replica_id]
                self._take(work)
            elif replica_id not in running:
                del self._working[replica_id]
                self._put_back(work.part)
        for replica_id in self._staying():
            if replica_id in self._working:
                continue
            part = next((part for part in self._waiting if replica_id not in part.tried_by), None)
            if part is not None and not self._lost:
                self._waiting.remove(part)
                part.tried_by.add(replica_id)
                answer = running[replica_id].evaluate(part.index, self._parts, alone=self._alone)
                self._working[replica_id] = _StartedPart(part, answer, time.monotonic())

    def stuck(self) -> dict[str, str]:
        """Return the ids of the replicas that have exceeded the time limit for their part, with the reason as text."""
        now_s = time.monotonic()
        reason = f"its part of an evaluation was not finished within timeouts.evaluation_s={self._limit_s:g} s"
        return {
            replica_id: reason
            for replica_id, work in self._working.items()
            if now_s - work.began_s > self._limit_s and not is_ready(work.answer)
        }

    def result(self) -> Evaluation | None:
        """Return the joined result if :attr:`is_over`; None if the evaluation is lost. Raises the error of a part."""
        if self._error is not None:
            raise self._error
        if self._lost:
            return None
        from hwrl.rollout import Evaluation

        return Evaluation.join(self._done)

    def _take(self, work: _StartedPart) -> None:
        try:
            evaluation = value_of(work.answer)
        except (*DEATH_ERRORS, EngineError):  # the replica died, or its rollouter ended
            self._put_back(work.part)
        except HwrlError as exc:
            self._error = exc
        else:
            self._done += [] if evaluation is None else [evaluation]

    def _put_back(self, part: _EvaluationPart) -> None:
        self._waiting.append(part)
        self._lost |= len(part.tried_by) >= _TRIES
