"""``hwrl bench load``: several ranks load one sharded model; seconds, and the peak of each rank's host memory."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.errors import ConfigError
from hwrl.interfaces import Capability
from hwrl_bench.arguments import add_json, positive_float, positive_int
from hwrl_bench.models import ModelShape
from hwrl_bench.result import machine_line, provenance, report
from hwrl_bench.ways import BenchPlan

if TYPE_CHECKING:
    import torch

    from hwrl.interfaces import Backend

HELP = "ranks that load one sharded model: seconds, and the most host memory of each"

WAYS = ("by parts", "first rank")
"""Each rank reads its own part; or the first rank reads all and broadcasts, as it does for files of other formats."""

_HIDDEN, _VOCABULARY = 2048, 32_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--gib", type=positive_float, default=1.0, help="files of the model, bfloat16 (default 1)")
    parser.add_argument("--ranks", type=positive_int, default=4, help="training ranks (default 4)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: both")
    parser.add_argument("--timeout", type=positive_float, default=600.0, help="seconds for each way (default 600)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write a random model, load it in each way, print a table, write the JSON."""
    from hwrl import get_backend
    from hwrl.comm import serve_store, store_address
    from hwrl.testing import run_processes

    require_devices(get_backend(), args.ranks)
    with tempfile.TemporaryDirectory(prefix="hwrl-bench-") as place:
        directory, bare = Path(place) / "model", Path(place) / "configuration"
        bare.mkdir()
        nbytes = _write_model(directory, bare, nbytes=args.gib * (1 << 30))

        def measure(way: str) -> list[dict[str, Any]]:
            store = serve_store()
            arguments = (directory, bare if way == "first rank" else directory, store_address(store), args.ranks)
            return run_processes(load, args.ranks, *arguments, timeout_s=args.timeout)

        ways = BenchPlan(tuple(args.ways), rounds=1).one_by_one(measure)
    result = {"benchmark": "load", "nbytes": nbytes, "ways": ways, **provenance("torch", "safetensors")}
    result["device"] = ways[args.ways[0]][0]["device"]
    report(result, _table(result), json_path=args.json)
    return 0


def require_devices(backend: Backend, ranks: int) -> None:
    """Raise ConfigError if the backend's collectives need a device for each of ``ranks`` and there are fewer."""
    count = backend.device_count()
    sharing = backend.supports(Capability.SHARED_DEVICE_GROUPS)
    if backend.supports(Capability.COLLECTIVES).usable and not sharing.usable and count < ranks:
        raise ConfigError(
            f"--ranks={ranks} cannot load a model together on {count} device(s)",
            why=f"each rank needs a device of its own: {sharing.reason}",
            fix=f"use --ranks {count} or fewer, or HWRL_BACKEND=cpu",
        )


def _write_model(directory: Path, bare: Path, *, nbytes: float) -> int:
    """Write a model of about ``nbytes`` to ``directory``, its configuration to ``bare``; return its weights' bytes."""
    import torch

    from hwrl.models import build_meta_model
    from hwrl.safetensors_files import write_tensors

    shape = ModelShape(_VOCABULARY, _HIDDEN, 3 * _HIDDEN, 1, _HIDDEN // 128, _HIDDEN // 256)
    layers = max(1, round((nbytes / 2 - _VOCABULARY * _HIDDEN) / shape.layer_parameters))
    shape = ModelShape(_VOCABULARY, _HIDDEN, 3 * _HIDDEN, layers, _HIDDEN // 128, _HIDDEN // 256)
    shape.write(bare)
    described = dict(build_meta_model(bare, dtype=torch.bfloat16).named_parameters())
    largest = max(one.numel() for one in described.values())  # new numbers for each would take a minute for 2 GiB
    numbers = torch.randn(largest, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def random() -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in described.items():
            yield name, numbers[: one.numel()].view(one.shape)

    write_tensors(directory, described.items(), random())
    shape.write(directory)
    return sum(one.nbytes for one in described.values())


def load(rank: int, directory: Path, others: Path, address: str, ranks: int) -> dict[str, Any]:
    """Load this rank's shards in float32. ``others`` is the directory of the ranks above 0."""
    import torch

    from hwrl import get_backend
    from hwrl.comm import Comm, connect_store
    from hwrl.interfaces import EngineSettings
    from hwrl.models import build_meta_model
    from hwrl.train import ShardedModel, StateMemory, layers_of, open_model, read_weights

    backend, mine = get_backend(), others if rank else directory
    backend.set_device(rank % backend.device_count())
    group = Comm().init_default(store=connect_store(address), rank=rank, size=ranks)
    build_meta_model(others, dtype=torch.float32)  # imports the architecture
    group.barrier()
    before, started_s = _resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    model, reader = open_model(mine, group=group, backend=backend)
    layers = layers_of(model)
    settings = EngineSettings(model_directory=mine, learning_rate=0, total_steps=1)
    memory = StateMemory.of(model, layers, settings, ranks=ranks)
    layer_nbytes = sum(one.numel() * 4 for one in layers[0].parameters())
    options: dict[str, Any] = {"group": group, "backend": backend, "memory": memory, "usable_nbytes": lambda: 0}
    ShardedModel(model, layers, dtype=torch.float32, **options)
    read_weights(model, reader, directory=mine, group=group, backend=backend)
    backend.synchronize()
    seconds, peak = time.perf_counter() - started_s, _resident("VmHWM") - before
    group.close()
    return {
        "peak_nbytes": peak,
        "shard_nbytes": memory.parameters,
        "layer_nbytes": layer_nbytes,
        "seconds": seconds,
        "device": backend.info.device_type,
    }


def _resident(key: str) -> int:
    """Return the host memory of this process in bytes: VmRSS for now, VmHWM for its peak. Linux only."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None, "Linux writes it"
    return int(found[1]) << 10


def _table(result: dict[str, Any]) -> str:
    lines = [machine_line(result), f"a model of {result['nbytes'] / 1e9:.2f} GB in bfloat16, loaded in float32", ""]
    lines += ["| way | rank | most host memory | its shard | a layer | seconds |", "|---|---|---|---|---|---|"]
    for way, ranks in result["ways"].items():
        for number, rank in enumerate(ranks):
            sizes = " | ".join(
                f"{rank[key] / (1 << 20):,.0f} MiB" for key in ("peak_nbytes", "shard_nbytes", "layer_nbytes")
            )
            lines.append(f"| {way} | {number} | {sizes} | {rank['seconds']:.1f} |")
    return "\n".join(lines)
