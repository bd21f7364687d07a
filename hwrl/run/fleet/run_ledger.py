"""The driver's calls to the process of the prompt ledger."""

from __future__ import annotations

from typing import Any

from hwrl.errors import EngineError
from hwrl.interfaces import PromptGroup
from hwrl.run.config import Config
from hwrl.run.fleet.heartbeats import Timeout
from hwrl.run.fleet.monitor import ProcessMonitor
from hwrl.run.processes.actors import BatchInfo, ForgottenReplica
from hwrl.run.processes.answers import DEATH_ERRORS, Answer, ValueT, is_ready, value_of, why_died
from hwrl.run.processes.handles import LedgerHandle

LEDGER = "the ledger"
"""The name of the ledger's process in log lines."""
POLL_S = 1.0


class DriverLedger:
    """Starts the ledger's process and calls it. Each call except :meth:`advance_and_take` blocks until the answer.

    Raises EngineError if the ledger has died or does not answer in time. A run cannot continue without its ledger.
    """

    def __init__(self, config: Config, *, monitor: ProcessMonitor) -> None:
        self._limits, self._monitor = config.timeouts, monitor
        self.handle = LedgerHandle(config)
        monitor.watch(LEDGER, self.handle)

    def advance_and_take(self, count: int, version: int) -> tuple[Answer[list[PromptGroup]], Answer[BatchInfo | None]]:
        """Advance the ledger to ``version``, the newest published one, and request a batch. Does not block.

        Advancing lets the replicas lease more prompts. The first answer is a batch of ``count`` groups; pass it to the
        trainers without reading it. The second answer describes the batch; read it with :meth:`value_of`.
        """
        return self.handle.advance_and_take(count, version)

    def abandon_take(self) -> None:
        """End a waiting :meth:`advance_and_take`. Its description is then None, unless the batch came before."""
        self._wait(self.handle.abandon_take(), "abandon_take")

    def forget(self, replica_id: str) -> ForgottenReplica:
        """Make all prompts of a dead replica free for others. Its replacement has another id."""
        return self._wait(self.handle.forget(replica_id), "forget")

    def expire_overdue(self) -> list[str]:
        """Make prompts without progress free for others; return the ids of the replicas that had leased them."""
        return self._wait(self.handle.expire_overdue(), "expire_overdue")

    def load_state_dict(self, state: dict[str, Any], incarnation: int) -> None:
        """Restore the state of a checkpoint, for a new incarnation of the trainer."""
        self._wait(self.handle.load_state_dict(state, incarnation), "load_state_dict")

    def value_of(self, answer: Answer[ValueT]) -> ValueT:
        """Wait for an answer of the ledger, without a time limit; return its value."""
        try:
            return value_of(answer)
        except DEATH_ERRORS as exc:
            raise ledger_died(why_died(exc)) from exc

    def _wait(self, answer: Answer[ValueT], call: str) -> ValueT:
        key = "heartbeat_s" if self._monitor.is_up(LEDGER) else "start_s"
        timeout = Timeout(getattr(self._limits, key))
        while not is_ready(answer, timeout_s=POLL_S):
            self._monitor.update()
            if timeout.is_over():
                raise ledger_died(f"it did not answer {call!r} within timeouts.{key}={timeout.limit_s:g} s")
        return self.value_of(answer)


def ledger_died(why: str) -> EngineError:
    """Return the error about a dead ledger."""
    return EngineError(
        "the prompt ledger died",
        why=why,
        fix="resume=true continues from the last checkpoint, if there is one",
    )
