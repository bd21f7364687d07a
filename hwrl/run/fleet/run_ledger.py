"""The process of the prompt ledger, for the driver."""

from __future__ import annotations

from collections.abc import Sequence
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
"""The name of its process in log lines."""
POLL_S = 1.0


class DriverLedger:
    """Starts the ledger and calls it. Each call but :meth:`take` blocks until the answer is there.

    Raises EngineError if the ledger is dead or answers too late: no run can continue without its ledger.
    """

    def __init__(self, config: Config, *, monitor: ProcessMonitor) -> None:
        self._limits, self._monitor = config.timeouts, monitor
        self.handle = LedgerHandle(config)
        monitor.watch(LEDGER, self.handle)

    def advance_and_take(self, count: int, version: int) -> tuple[Answer[list[PromptGroup]], Answer[BatchInfo | None]]:
        """Request a batch of ``count`` groups, and tell the ledger that ``version`` is published. Does not block.

        The first answer, the groups, goes to the trainers as it is. :meth:`value_of` reads the second one.
        """
        return self.handle.advance_and_take(count, version)

    def abandon_take(self) -> None:
        """End a waiting :meth:`take`."""
        self._wait(self.handle.abandon_take(), "abandon_take")

    def set_throttle(self, lead_groups: int | None, asleep: Sequence[str]) -> None:
        """Admit at most ``lead_groups`` groups beyond the present version's, and lease none to ``asleep`` replicas."""
        self._wait(self.handle.set_throttle(lead_groups, asleep), "set_throttle")

    def forget(self, replica_id: str) -> ForgottenReplica:
        """Take back all prompts of a dead replica. A replacement of it has another id."""
        return self._wait(self.handle.forget(replica_id), "forget")

    def expire_overdue(self) -> list[str]:
        """Take back prompts without progress; return the ids of the replicas that held them."""
        return self._wait(self.handle.expire_overdue(), "expire_overdue")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self._wait(self.handle.state_dict(), "state_dict")

    def load_state_dict(self, state: dict[str, Any], incarnation: int) -> None:
        """Go back to the state of a checkpoint, for a new incarnation of the trainer."""
        self._wait(self.handle.load_state_dict(state, incarnation), "load_state_dict")

    def value_of(self, answer: Answer[ValueT]) -> ValueT:
        """Wait for one of the ledger's answers without a limit; return its value."""
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
                raise ledger_died(f"it did not answer {call!r} within timeouts.{key}={timeout.limit_s:g}")
        return self.value_of(answer)


def ledger_died(why: str) -> EngineError:
    """Return the error for a dead ledger."""
    return EngineError(
        "the ledger of prompts died",
        why=why,
        fix="resume=true continues from the last checkpoint, if there is one",
    )
