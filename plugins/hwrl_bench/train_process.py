"""One process of ``hwrl bench train``: it measures one way."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl import Capability, get_backend
from hwrl.interfaces import EngineSettings
from hwrl_bench.models import MODELS, random_weights
from hwrl_bench.train_rows import RaggedRows, even_rows, random_batch, step_flops

if TYPE_CHECKING:
    import torch

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
class TrainWay:
    """A way with the most tokens of one pass, on ``ranks`` devices."""

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


def measure(rank: int, address: str, way: TrainWay, workload: TrainWorkload, rounds: int) -> dict[str, Any]:
    """Take a step to warm up and ``rounds`` more; return seconds, loss and memory of this rank."""
    import torch

    from hwrl.discovery import process_env

    backend = get_backend()
    os.environ |= process_env("trainer")  # read when the device is first used
    backend.set_device(rank % max(1, backend.device_count()))
    group = _join(rank, way.ranks, address, backend)
    begin = time.perf_counter()
    step, lengths_of = _make(way, workload, backend, group)
    made_s = time.perf_counter() - begin
    _reset_peak(backend)
    lengths = [lengths_of(number if workload.new_lengths else 0) for number in range(1 + rounds)]
    timed = [_timed(backend, step, each, workload, seed=rank // way.context_parallel) for each in lengths]
    shape, prompt, sharing = MODELS[workload.model], workload.rows.prompt, way.context_parallel
    row = {
        "make_s": made_s,
        "warm_up_s": timed[0][0],
        "seconds": [seconds for seconds, _ in timed[1:]],
        "tokens": [(sum(each) + len(each) * prompt) / sharing for each in lengths[1:]],
        "flops": [step_flops(shape, each, prompt=prompt) / sharing for each in lengths[1:]],
        "loss": timed[-1][1]["loss"],
        "metrics": timed[-1][1],
        "recompilations": sum(metrics.get("recompilations", 0.0) for _, metrics in timed[1:]),
        "peak_nbytes": _peak_nbytes(backend),
        "peak_flops": backend.peak_flops(getattr(torch, workload.dtype)),
        "device": _device_name(backend),
    }
    if group is not None:
        group.close()
    return row


def _join(rank: int, ranks: int, address: str, backend: Backend) -> Group | None:
    if ranks == 1:
        return None
    from hwrl.comm import Comm, connect_store

    return Comm(backend).init_default(store=connect_store(address), rank=rank, size=ranks, timeout_s=300.0)


def _make(
    way: TrainWay, workload: TrainWorkload, backend: Backend, group: Group | None
) -> tuple[Callable[[Batch], dict[str, float]], Callable[[int], list[int]]]:
    """Return the way's step, and a function from a seed to the length of each response in a batch."""
    import torch

    dtype, rows = getattr(torch, workload.dtype), workload.rows
    if way.name in REFERENCE_WAYS:
        from hwrl_bench.train_references import ReferenceTraining

        length = min(REFERENCE_LENGTH.get(workload.model, 2048), way.tokens)
        reference = ReferenceTraining(
            workload.directory,
            dtype=dtype,
            device=backend.device(),
            pass_tokens=way.tokens,
            learning_rate=_LEARNING_RATE,
            **REFERENCE_WAYS[way.name],
        )
        even = even_rows(rows, length=length, multiple=way.tokens // length)
        return reference.train_batch, lambda _: even
    return make_engine_step(way, workload.directory, dtype, backend, group), rows.responses


def make_engine_step(
    way: TrainWay, directory: Path, dtype: torch.dtype, backend: Backend, group: Group | None
) -> Callable[[Batch], dict[str, float]]:
    """Return the step of hwrl's engine, with random weights."""
    from hwrl.train import FsdpEngine, PolicyLoss

    settings = EngineSettings(
        model_directory=directory,
        learning_rate=_LEARNING_RATE,
        total_steps=1000,
        micro_batch_tokens=way.tokens,
        dtype=dtype,
        context_parallel=way.context_parallel,
        **ENGINE_WAYS[way.name],
    )
    with random_weights(backend, on_host=group is not None):  # one rank keeps the whole model on its device anyway
        engine = FsdpEngine(settings, backend=backend, group=group)
    loss = PolicyLoss()
    return lambda batch: engine.train_batch(batch, loss=loss)


def _timed(
    backend: Backend,
    step: Callable[[Batch], dict[str, float]],
    lengths: list[int],
    workload: TrainWorkload,
    *,
    seed: int,
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step on random rows of these lengths, and its metrics."""
    vocabulary = MODELS[workload.model].vocab_size
    batch = random_batch(lengths, prompt=workload.rows.prompt, vocabulary=vocabulary, seed=seed)
    backend.synchronize()
    begin = time.perf_counter()
    metrics = step(batch)
    backend.synchronize()
    return time.perf_counter() - begin, metrics


def _reset_peak(backend: Backend) -> None:
    """Forget the most memory in use until now, where torch can: a loader may have held more than a step does."""
    reset = getattr(backend.device_module, "reset_peak_memory_stats", None)
    if reset is not None:
        reset()


def _peak_nbytes(backend: Backend) -> int | None:
    usable = backend.supports(Capability.MEMORY_STATS).usable
    return backend.memory_info().peak_nbytes if usable else None


def _device_name(backend: Backend) -> str:
    properties = getattr(backend.device_module, "get_device_properties", None)
    return str(backend.device()) if properties is None else str(properties(backend.current_index()).name)
