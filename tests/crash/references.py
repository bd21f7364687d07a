"""Bad orders of writing, from two frameworks in 2026. They lose or mix checkpoints; the matrix must find this."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.crash.matrix import Session, Subject

TRACKER = "latest_checkpointed_iteration.txt"


class Reference(Subject):
    """Keeps one step; opening does nothing, and nobody sweeps."""

    errors = (OSError, RuntimeError)

    def __init__(self, kind: type[ReferenceSession]) -> None:
        self._kind, self.name = kind, kind.__name__

    @contextlib.contextmanager
    def open(self, home: Path, *, rank: int, life: str, timeout_s: float) -> Iterator[Session]:
        yield self._kind(home)

    def steps(self, home: Path) -> list[int]:
        step = self._kind(home).resume()
        return [] if step is None else [step]

    def leftovers(self, home: Path) -> list[str]:
        return []


class ReferenceSession(Session):
    def __init__(self, home: Path) -> None:
        self.home = home


class DeletesEarly(ReferenceSession):
    """verl's order with one step kept: each part of the old step is removed when its new part is written; data position
    and tracker come last. Nothing is synced."""

    def save(self, step: int) -> None:
        new = self.home / f"global_step_{step}"
        for part in ("actor", "critic"):
            old = list(self.home.glob(f"global_step_*/{part}"))
            (new / part).mkdir(parents=True)
            for name in ("model", "optim", "extra"):
                torch.save({"weight": torch.full((64,), float(step))}, new / part / f"{name}.pt")
            for path in old:
                shutil.rmtree(path)
        torch.save({"position": step}, new / "data.pt")
        (self.home / TRACKER).write_text(str(step))

    def resume(self) -> int | None:
        if not (self.home / TRACKER).exists():
            return None
        step = int((self.home / TRACKER).read_text())
        old = self.home / f"global_step_{step}"
        says = {torch.load(old / "data.pt")["position"]}
        for part in ("actor", "critic"):
            for name in ("model", "optim", "extra"):
                says |= set(torch.load(old / part / f"{name}.pt")["weight"].tolist())
        assert says == {step}, says
        return step


class WritesInPlace(ReferenceSession):
    """AReaL's order for recovery: one directory, overwritten by every save; then small files with the step."""

    def save(self, step: int) -> None:
        state = {"model": torch.full((64,), float(step)), "optimizer": torch.full((64,), float(step)), "step": step}
        with _as_error():
            save(state, checkpoint_id=self.home / "recover", no_dist=True)
        for name in ("info", "dataloader", "evaluator"):
            (self.home / f"{name}.json").write_text(json.dumps({"step": step}))

    def resume(self) -> int | None:
        if not (self.home / "info.json").exists():
            return None
        state: dict[str, Any] = {"model": torch.zeros(64), "optimizer": torch.zeros(64), "step": 0}
        with _as_error():
            load(state, checkpoint_id=self.home / "recover", no_dist=True)
        says = {state["step"], *state["model"].tolist(), *state["optimizer"].tolist()}
        for name in ("info", "dataloader", "evaluator"):
            says.add(json.loads((self.home / f"{name}.json").read_text())["step"])
        assert len(says) == 1, f"a mix of steps {sorted(says)}"
        return int(says.pop())


@contextlib.contextmanager
def _as_error() -> Iterator[None]:
    """Make an Exception of torch's CheckpointException: it is none."""
    try:
        yield
    except CheckpointException as exc:
        raise RuntimeError(str(exc)) from exc
