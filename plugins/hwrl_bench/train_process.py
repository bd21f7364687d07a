"""One process of ``hwrl bench train``: it measures one way."""

from __future__ import annotations

import dataclasses
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl import get_backend
from hwrl.interfaces import EngineSettings
from hwrl_bench.device import device_name, peak_nbytes, reset_peak
from hwrl_bench.models import MODELS, random_weights
from hwrl_bench.train_rows import RaggedRows, even_rows, random_batch, step_flops
from hwrl_bench.ways import BenchPlan, Way

if TYPE_CHECKING:
    from hwrl import Backend
    from hwrl.comm import Group
    from hwrl.interfaces import Batch

ENGINE_WAYS: dict[str, dict[str, Any]] = {
    "hwrl": {},
    "hwrl checkpointing": {"activation_checkpointing": True},
    "hwrl no checkpointing": {"activation_checkpointing": False},
    "hwrl compiled": {"compile": True},
    "hwrl uncompiled": {"compile": False},
    "hwrl shared": {},
}
"""Ways of hwrl's engine: what differs from the defaults of EngineSettings."""

_SHARED = "hwrl shared"

REFERENCE_WAYS: dict[str, dict[str, bool]] = {
    "reference compiled": {"compiled": True, "checkpointing": False},
    "reference compiled checkpointing": {"compiled": True, "checkpointing": True},
    "reference": {"compiled": False, "checkpointing": False},
    "reference checkpointing": {"compiled": False, "checkpointing": True},
}
"""Ways in plain torch, and their options."""

WAYS = (*ENGINE_WAYS, *REFERENCE_WAYS)
REFERENCE_LENGTH = {"tiny": 128}
"""Tokens in a row of the references, 2048 if the model is not here."""
_LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class TrainWorkload:
    """The model, its rows and the dtype, the same for every way. ``directory`` holds the model's configuration.

    With ``new_lengths`` each step of hwrl's ways has rows of other lengths, so compiled code meets new shapes.
    """

    model: str
    directory: Path
    rows: RaggedRows
    dtype: str
    new_lengths: bool = False


@dataclass(frozen=True)
class TrainSetup:
    """A way's name, with the most tokens of one pass, on ``ranks`` devices."""

    name: str
    tokens: int
    ranks: int

    @property
    def title(self) -> str:
        """The way's name in the result."""
        return f"{self.name}@{self.tokens}" + (f" on {self.ranks}" if self.ranks > 1 else "")

    @property
    def context_parallel(self) -> int:
        """The number of devices that share each pack, and so the rows."""
        return self.ranks if self.name == _SHARED else 1

    def why_not(self) -> str | None:
        """Return the reason if this hwrl cannot run the way, else None."""
        known = {field.name for field in dataclasses.fields(EngineSettings)}
        unknown = ", ".join(sorted(ENGINE_WAYS.get(self.name, {}).keys() - known))
        if unknown:
            return f"this hwrl has no setting {unknown}"
        return "the reference has one rank" if self.name in REFERENCE_WAYS and self.ranks > 1 else None


def default_tokens(name: str) -> int:
    """Return the tokens of a pass of the way ``name``: hwrl's default, and what was best for the references."""
    if name in ENGINE_WAYS:
        return EngineSettings.micro_batch_tokens
    return 16384 if REFERENCE_WAYS[name]["checkpointing"] else 8192


def measure(rank: int, address: str, setup: TrainSetup, workload: TrainWorkload, plan: BenchPlan) -> dict[str, Any]:
    """Take the steps of the plan, of which the first warms up; return seconds, loss and memory of this rank."""
    import torch

    from hwrl.discovery import process_env

    backend = get_backend()
    os.environ |= process_env("trainer")  # read when the device is first used
    backend.set_device(rank % max(1, backend.device_count()))
    group = _join(rank, setup.ranks, address, backend)
    begin = time.perf_counter()
    way = (ReferenceWay if setup.name in REFERENCE_WAYS else EngineWay)(setup, workload, backend, group)
    made_s = time.perf_counter() - begin
    reset_peak(backend)
    numbers = range(plan.warm_up + plan.rounds)
    lengths = [way.lengths(number if workload.new_lengths else 0) for number in numbers]
    timed = [_timed(backend, way, each, workload, seed=rank // setup.context_parallel) for each in lengths]
    shape, prompt, sharing = MODELS[workload.model], workload.rows.prompt, setup.context_parallel
    row = {
        "make_s": made_s,
        "warm_up_s": timed[0][0],
        "seconds": [seconds for seconds, _ in timed[1:]],
        "tokens": [(sum(each) + len(each) * prompt) / sharing for each in lengths[1:]],
        "flops": [step_flops(shape, each, prompt=prompt) / sharing for each in lengths[1:]],
        "loss": timed[-1][1]["loss"],
        "metrics": timed[-1][1],
        "recompilations": sum(metrics.get("recompilations", 0.0) for _, metrics in timed[1:]),
        "peak_nbytes": peak_nbytes(backend),
        "peak_flops": backend.peak_flops(getattr(torch, workload.dtype)),
        "device": device_name(backend),
    }
    if group is not None:
        group.close()
    return row


def _join(rank: int, ranks: int, address: str, backend: Backend) -> Group | None:
    if ranks == 1:
        return None
    from hwrl.comm import Comm, connect_store

    return Comm(backend).init_default(store=connect_store(address), rank=rank, size=ranks, timeout_s=300.0)


class TrainWay(Way, ABC):
    """A way to take optimizer steps. The constructor makes the model, with random weights."""

    @abstractmethod
    def train_batch(self, batch: Batch) -> dict[str, float]:
        """Take a step on ``batch``; return its metrics."""

    @abstractmethod
    def lengths(self, seed: int) -> list[int]:
        """Return the length of each response of a batch."""


class EngineWay(TrainWay):
    """hwrl's engine on ragged rows, other ones for each seed."""

    def __init__(self, setup: TrainSetup, workload: TrainWorkload, backend: Backend, group: Group | None) -> None:
        import torch

        from hwrl.train import FsdpEngine, PolicyLoss

        settings = EngineSettings(
            model_directory=workload.directory,
            learning_rate=_LEARNING_RATE,
            total_steps=1000,
            micro_batch_tokens=setup.tokens,
            dtype=getattr(torch, workload.dtype),
            context_parallel=setup.context_parallel,
            **ENGINE_WAYS[setup.name],
        )
        with random_weights(backend, on_host=group is not None):  # one rank keeps the whole model on its device anyway
            self._engine = FsdpEngine(settings, backend=backend, group=group)
        self._rows, self._loss = workload.rows, PolicyLoss()

    def train_batch(self, batch: Batch) -> dict[str, float]:
        return self._engine.train_batch(batch, loss=self._loss)

    def lengths(self, seed: int) -> list[int]:
        return self._rows.responses(seed)


class ReferenceWay(TrainWay):
    """Plain torch on even rows, the same for each seed."""

    def __init__(self, setup: TrainSetup, workload: TrainWorkload, backend: Backend, group: Group | None) -> None:
        import torch

        from hwrl_bench.train_references import ReferenceTraining

        length = min(REFERENCE_LENGTH.get(workload.model, 2048), setup.tokens)
        self._training = ReferenceTraining(
            workload.directory,
            dtype=getattr(torch, workload.dtype),
            device=backend.device(),
            pass_tokens=setup.tokens,
            learning_rate=_LEARNING_RATE,
            **REFERENCE_WAYS[setup.name],
        )
        self._lengths = even_rows(workload.rows, length=length, multiple=setup.tokens // length)

    def train_batch(self, batch: Batch) -> dict[str, float]:
        return self._training.train_batch(batch)

    def lengths(self, seed: int) -> list[int]:
        return self._lengths


def _timed(
    backend: Backend, way: TrainWay, lengths: list[int], workload: TrainWorkload, *, seed: int
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step on random rows of these lengths, and its metrics."""
    vocabulary = MODELS[workload.model].vocab_size
    batch = random_batch(lengths, prompt=workload.rows.prompt, vocabulary=vocabulary, seed=seed)
    backend.synchronize()
    begin = time.perf_counter()
    metrics = way.train_batch(batch)
    backend.synchronize()
    return time.perf_counter() - begin, metrics
