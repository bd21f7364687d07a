"""A stand-in for the processes of a run that keeps the real ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwrl.checkpoint import DurableFS
from hwrl.rollout import PromptLedger
from hwrl.run.ledger import BatchInfo
from hwrl.run.report import PROMPTS
from hwrl.run.trainer import RestoredRun
from tests.support.finished_groups import finished
from tests.support.two_step_run import CHECKPOINT, StandInFleet


class FleetWithLedger(StandInFleet):
    """Has the real ledger of two steps. Its replica finishes all prompts at once."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, DurableFS())
        self._path = home / "ledger.json"
        self._prompts = PromptLedger(groups_per_version=2, max_staleness=1, total_groups=4, group_timeout_s=600.0)

    def request_batch(self, version: int) -> tuple[list[Any], str]:
        self._prompts.advance(version)
        for lease in self._prompts.lease(4, replica="replica-0#0", now_s=0.0):
            self._prompts.complete(finished(lease))
        groups = self._prompts.take(2)
        assert groups is not None, "the run would wait for ever"
        self._taken = [group.sequence_number for group in groups]
        return groups, "info"

    def value_of(self, info: str) -> BatchInfo | None:
        return BatchInfo(self._taken, {}, {}, ledger=self._prompts.state_dict())

    def save(self, ledger: dict[str, Any]) -> dict[str, float]:
        self._path.write_text(json.dumps(ledger))
        return super().save(ledger)

    def restore(self) -> RestoredRun | None:
        if not self._path.exists():
            return None
        self._step = int((self._home / CHECKPOINT).read_text())
        return RestoredRun(self._step, json.loads(self._path.read_text()), [], [])

    def load_state_dict(self, state: dict[str, Any], incarnation: int) -> None:
        self._prompts.load_state_dict(state, incarnation=incarnation)


def trained_prompts(home: Path) -> list[int]:
    lines = [json.loads(line) for line in (home / PROMPTS).read_text().splitlines()]
    return [number for line in lines for number in line["sequence_numbers"]]
