"""A stand-in for the processes of a run: the real loop over the steps runs on it, without Ray."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, cast

from hwrl.checkpoint import DurableFS
from hwrl.errors import CheckpointSaveError
from hwrl.run.cluster.placement import DeviceCounts
from hwrl.run.config import Config
from hwrl.run.fleet import Fleet
from hwrl.run.interrupts import Interrupts
from hwrl.run.ledger import BatchInfo
from hwrl.run.loop import RunLoop
from hwrl.run.report import PlainView
from hwrl.run.trainer import StepOutcome

CHECKPOINT = "checkpoint"
METRICS_OF_A_STEP = {
    **dict.fromkeys(["reward/mean", "staleness/mean", "staleness/max", "weights/version"], 1.0),
    **dict.fromkeys(["response/tokens", "timing_s/wait"], 1.0),
}


class StandInFleet:
    """A :class:`~hwrl.run.fleet.Fleet` of a run of two steps. A checkpoint is a file with its step."""

    incarnation, device_counts = 0, DeviceCounts(1, 2)
    deaths: ClassVar[Counter[str]] = Counter()

    def __init__(self, home: Path, fs: DurableFS) -> None:
        self._home, self._fs, self._step = home, fs, 0
        self.trainers = self.all = self.replicas = self.ledger = self.waits = self

    def do_nothing(self, *arguments: Any, **keywords: Any) -> None:
        """Take the place of a call without an effect here."""

    launch = begin = serve_new_receivers = publish_last_weights = note_progress = do_nothing
    send_weights = export_model = load_state_dict = abandon_take = close = wait_for_save = do_nothing
    take_batch, restart_trainers = Fleet.take_batch, Fleet.restart_trainers

    def ask(self, method: Any, *arguments: Any) -> Any:
        """Call the method of the ledger with this name."""
        return getattr(self, method.__name__)(*arguments)

    def waiting_for(self, subject: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def request_batch(self, version: int) -> tuple[list[Any], str]:
        return [], "info"

    def watch(self, answers: list[Any]) -> list[Any]:
        return answers

    def value_of(self, info: str) -> BatchInfo | None:
        return BatchInfo([self._step + 1], {}, {})

    def step(self, groups: list[Any]) -> StepOutcome:
        self._step += 1
        return StepOutcome(METRICS_OF_A_STEP, [])

    def repeated_deaths(self) -> list[str]:
        return []

    def idle_step(self) -> int | None:
        return self._step

    def save(self, ledger: dict[str, Any]) -> dict[str, float]:
        try:
            self._fs.replace_file(self._home / CHECKPOINT, str(self._step).encode())
        except OSError as exc:
            raise CheckpointSaveError(f"step {self._step} was not saved", why=str(exc)) from exc
        return {"checkpoint/blocked_s": 0.5}


def train(home: Path, fleet: StandInFleet, interrupts: Interrupts, **settings: Any) -> str:
    """Run the loop of ``hwrl train`` in ``home`` with ``settings``, without processes; return the logged lines."""
    stream = io.StringIO()
    view = PlainView(2, stream=stream)
    words: dict[str, Any] = {"model": {"path": home}, "data": {"train": home}, "reward": {"function": "a:b"}}
    words |= {"dir": home, "train": {"steps": 2}, "checkpoint": {"save_every_steps": 1}}
    config = Config.model_validate({**words, **settings})
    RunLoop(config, view, interrupts, fleet=cast(Fleet, fleet)).run()
    return stream.getvalue()
