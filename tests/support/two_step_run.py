"""A run of two steps without processes: a stand-in for its fleet, and the loop over the steps on top of it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, cast

from hwrl.checkpoint import DurableFS
from hwrl.errors import CheckpointSaveError
from hwrl.run.actors import Taken
from hwrl.run.config import Config
from hwrl.run.fleet import Fleet
from hwrl.run.interrupts import Interrupts
from hwrl.run.pipeline import Pipeline
from hwrl.run.report import PlainView

CHECKPOINT = "checkpoint"
FIGURES = {
    **dict.fromkeys(["reward/mean", "staleness/mean", "staleness/max", "weights/version"], 1.0),
    **dict.fromkeys(["response/tokens", "timing_s/wait"], 1.0),
}


class Trainers:
    """Stands for a :class:`~hwrl.run.fleet.Fleet` of a run of two steps; a checkpoint is a file with its step."""

    size, refused, incarnation = "nothing", False, 0

    def __init__(self, home: Path, fs: DurableFS) -> None:
        self._home, self._fs, self._step = home, fs, 0

    def launch(self) -> None:
        """Start nothing."""

    await_replicas = serve_joiners = launch

    def close(self, *, failed: bool) -> None:
        """End nothing."""

    def describe(self) -> str:
        return self.size

    def waiting_for(self, what: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def take(self, count: int, version: int) -> tuple[list[Any], str]:
        return [], "note"

    def watch(self, references: list[Any]) -> list[Any]:
        return references

    def ledger_value(self, note: str) -> Taken | None:
        return Taken([self._step + 1], {}, {})

    def on_ledger(self, method: str, *args: Any) -> dict[str, Any]:
        return {}

    def on_trainers(self, method: str, *args: Any) -> list[Any]:
        if method == "step":
            self._step += 1
            return [FIGURES]
        if method == "save":
            try:
                self._fs.replace_file(self._home / CHECKPOINT, str(self._step).encode())
            except OSError as exc:
                raise CheckpointSaveError(f"step {self._step} was not saved", why=str(exc)) from exc
            return [{"checkpoint/blocked_s": 0.5}]
        return [None]


def train(home: Path, fleet: Trainers, interrupts: Interrupts) -> None:
    """Run like ``hwrl train``, but without processes."""
    view = PlainView(2, stream=io.StringIO())
    words = {"model": {"path": home}, "data": {"train": home}, "reward": {"function": "a:b"}}
    config = Config.model_validate({"dir": home, "train": {"steps": 2}, "checkpoint": {"save_every_steps": 1}, **words})
    run = Pipeline(config, view, interrupts, fleet=cast(Fleet, fleet))
    try:
        run.run()
    except BaseException as error:
        run.close(after=error)
        raise
    run.close()
