"""``hwrl bench plan``: the planned memory of a training step beside the peak of a real one."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl_bench.arguments import add_json, positive_float, positive_int
from hwrl_bench.device import reset_peak
from hwrl_bench.models import MODELS
from hwrl_bench.result import provenance, report
from hwrl_bench.ways import BenchPlan

if TYPE_CHECKING:
    from hwrl import Backend

HELP = "the memory of a training step by hwrl plan, beside torch's peak in a real step"

_SETTINGS = {"auto": "auto", "true": True, "false": False}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=["tiny"], help="sizes (default tiny)")
    parser.add_argument("--tokens", type=positive_int, default=16384, help="of a pass (default 16384)")
    parser.add_argument("--length", type=positive_int, default=1024, help="tokens of a row (default 1024)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    parser.add_argument("--checkpointing", choices=tuple(_SETTINGS), default="auto", help="of activations")
    parser.add_argument("--compile", choices=tuple(_SETTINGS), default="auto", help="the layers")
    parser.add_argument("--timeout", type=positive_float, default=600.0, help="seconds for each model (default 600)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each model in a process of its own; print the table and write the JSON."""
    from hwrl.testing import run_processes

    options = {"tokens": args.tokens, "length": args.length, "dtype": args.dtype}
    options |= {"activation_checkpointing": _SETTINGS[args.checkpointing], "compile": _SETTINGS[args.compile]}
    rows = BenchPlan(tuple(args.model), rounds=1).one_by_one(
        lambda name: run_processes(measure, 1, name, options, timeout_s=args.timeout)[0]
    )
    result = {"benchmark": "plan", **options, "models": rows, **provenance("torch", "transformers")}
    report(result, table(result), json_path=args.json)
    return 0


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [f"{'model':<8}{'planned GiB':>14}{'measured GiB':>14}{'ratio':>8}"]
    for name, row in result["models"].items():
        planned, measured = (row[key] / (1 << 30) for key in ("planned_nbytes", "measured_nbytes"))
        lines.append(f"{name:<8}{planned:>14.3f}{measured:>14.3f}{planned / measured:>8.3f}")
    return "\n".join(lines)


def measure(rank: int, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Take two steps of two passes each; return the planned and the measured bytes, and the causes."""
    import torch

    from hwrl import get_backend
    from hwrl.interfaces import EngineSettings, phase_nbytes
    from hwrl.train import FsdpEngine, PolicyLoss, fsdp_memory, wants_compilation
    from hwrl_bench.models import random_weights
    from hwrl_bench.train_rows import random_batch

    backend, shape = get_backend(), MODELS[model]
    with tempfile.TemporaryDirectory() as directory:
        shape.write(Path(directory))
        settings = EngineSettings(
            model_directory=Path(directory),
            learning_rate=1e-6,
            total_steps=1000,
            micro_batch_tokens=options["tokens"],
            dtype=getattr(torch, options["dtype"]),
            activation_checkpointing=options["activation_checkpointing"],
            compile=wants_compilation(backend, setting=options["compile"]),
        )
        length = min(options["length"], options["tokens"])
        batch = random_batch([length - 1] * (2 * options["tokens"] // length), prompt=1, vocabulary=shape.vocab_size)

        def steps() -> None:
            with random_weights(backend, on_host=False):
                engine = FsdpEngine(settings, backend=backend, group=None)
            for _ in range(2):  # the optimizer's state comes with the first
                engine.train_batch(batch, loss=PolicyLoss())

        causes = fsdp_memory(settings, ranks=1, device_nbytes=backend.memory_info().total_nbytes)
        measured = peak_of(backend, steps)
    return {
        "planned_nbytes": phase_nbytes(causes, "step"),
        "measured_nbytes": measured,
        "causes": {one.cause: one.nbytes for one in causes if "step" in one.phases and one.place == "device"},
    }


def peak_of(backend: Backend, work: Callable[[], None]) -> int:
    """Do ``work``; return the peak of the bytes of tensors that it allocates."""
    import torch

    gc.collect()  # now, because a collection during the work would lower the count
    if reset_peak(backend):
        before = backend.memory_info().allocated_nbytes
        work()
        return backend.memory_info().peak_nbytes - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events: Any = profile.profiler.kineto_results.events()
    now = most = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += change
        most = max(most, now)
    return most
