"""``hwrl bench offload``: moving a model and its optimizer's state to the host and back, beside raw copies."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hwrl.cli.arguments import add_json, positive_float, positive_int, write_json

if TYPE_CHECKING:
    import torch

    from hwrl.interfaces import Backend

HELP = "memory offload against raw pinned copies of the same bytes, on this machine"

_HIDDEN, _INTERMEDIATE, _KEY_VALUE, _VOCABULARY = 1024, 3072, 256, 32_000  # the proportions of a small language model
_LAYER = [
    (_HIDDEN, _HIDDEN),
    (_KEY_VALUE, _HIDDEN),
    (_KEY_VALUE, _HIDDEN),
    (_HIDDEN, _HIDDEN),
    (_INTERMEDIATE, _HIDDEN),
    (_INTERMEDIATE, _HIDDEN),
    (_HIDDEN, _INTERMEDIATE),
    (_HIDDEN,),
    (_HIDDEN,),
]
_WARM_UP = 2
_NBYTES_OF_A_PARAMETER = 12  # float32, with AdamW's two moments


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--gib", type=positive_float, default=1.0, help="parameters and AdamW's state together, GiB (default 1)"
    )
    parser.add_argument("--rounds", type=positive_int, default=9, help="measurements of each way (default 9)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON; fail if values changed or host memory was allocated again."""
    from hwrl.discovery import get_backend

    bench = _Bench(get_backend(), nbytes=int(args.gib * (1 << 30)))
    rounds = [bench.round() for _ in range(_WARM_UP + args.rounds)][_WARM_UP:]
    result = _result(bench, rounds)
    print(_table(result))
    write_json(args.json, result)
    return 0 if result["bit_exact"] and result["host_allocated_nbytes"] == 0 else 1


class _Bench:
    """A model with its optimizer's state, the same bytes as one flat pair for raw copies, and one round of each way."""

    def __init__(self, backend: Backend, *, nbytes: int) -> None:
        import torch

        from hwrl.memory import Offloader

        self.backend = backend
        self.model = language_model(nbytes // _NBYTES_OF_A_PARAMETER, device=backend.device())
        self.optimizer = torch.optim.AdamW(self.model)
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = [value for one in self.optimizer.state.values() for value in one.values()]
        self.tensors = [*self.model, *(value for value in state if value.device == backend.device() and value.dim())]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.offloader = Offloader(self.model, self.optimizer, backend=backend)
        self.flat = torch.zeros(self.nbytes, dtype=torch.uint8, device=backend.device())
        self.pinned = backend.pinned_empty(self.nbytes)
        self.exact = True

    def round(self) -> dict[str, float]:
        """Measure each way once, in seconds; ``…_wall`` is the caller's clock, the others the device's."""
        found: dict[str, float] = {
            "raw_offload": self._timed(lambda: self.pinned.copy_(self.flat, non_blocking=True)),
            "raw_load": self._timed(lambda: self.flat.copy_(self.pinned, non_blocking=True)),
        }
        for tensor in self.tensors:
            tensor.detach().add_(1.0)
        copies, found["per_tensor_offload_wall"] = self._wall(self._copy_each)
        _, found["per_tensor_load_wall"] = self._wall(lambda: self._copy_back(copies))
        self.backend.empty_cache()  # of what this benchmark held itself
        used, held = self._used_nbytes(), self.offloader.pool_nbytes
        away, found["offload_wall"] = self._wall(self.offloader.offload)
        found["freed_nbytes"] = used - self._used_nbytes()
        back, found["load_wall"] = self._wall(self.offloader.load)
        found |= {"offload": away.seconds, "load": back.seconds}
        self.exact = self.exact and away.nbytes >= self.nbytes and self._equals(copies)
        again, found["skipped_offload_wall"] = self._wall(self.offloader.offload)
        self.exact = self.exact and again.nbytes == 0
        _, found["load_again_wall"] = self._wall(self.offloader.load)
        found["host_allocated_nbytes"] = self.offloader.pool_nbytes - held
        return found

    def _copy_each(self) -> list[torch.Tensor]:
        return [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]

    def _copy_back(self, copies: list[torch.Tensor]) -> None:
        for tensor, copy in zip(self.tensors, copies, strict=True):
            tensor.detach().copy_(copy)

    def _equals(self, copies: list[torch.Tensor]) -> bool:
        import torch

        return all(
            torch.equal(tensor, copy.to(tensor.device)) for tensor, copy in zip(self.tensors, copies, strict=True)
        )

    def _timed(self, work: Callable[[], Any]) -> float:
        self.backend.synchronize()
        begin, end = self.backend.event(timing=True), self.backend.event(timing=True)
        stream = self.backend.current_stream()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _wall(self, work: Callable[[], Any]) -> tuple[Any, float]:
        self.backend.synchronize()
        begin = time.perf_counter()
        result = work()
        self.backend.synchronize()
        return result, time.perf_counter() - begin

    def _used_nbytes(self) -> int:
        from hwrl.interfaces import Capability

        usable = self.backend.supports(Capability.MEMORY_STATS).usable
        return self.backend.memory_info().reserved_nbytes if usable else 0


def language_model(count: int, *, device: torch.device) -> torch.nn.ParameterList:
    """Return about ``count`` parameters in the shapes of a language model's layers, float32."""
    import torch

    embed = max(1, min(_VOCABULARY, count // 5 // _HIDDEN))
    shapes: list[tuple[int, ...]] = [(embed, _HIDDEN)]
    while sum(math.prod(shape) for shape in shapes) < count:
        shapes += _LAYER
    return torch.nn.ParameterList([torch.randn(shape, device=device) for shape in shapes])


# -- the result ----------------------------------------------------------------------------------------------------


def _result(bench: _Bench, rounds: list[dict[str, float]]) -> dict[str, Any]:
    from hwrl.cli.provenance import provenance

    seconds = {name: [one[name] for one in rounds] for name in rounds[0] if not name.endswith("nbytes")}
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ways = {}
    for name, median_s in medians.items():
        raw_s = medians["raw_load" if "load" in name.replace("offload", "") else "raw_offload"]
        ways[name] = {"median_s": median_s, "of_raw": raw_s / median_s, "seconds": seconds[name]}
        if "skipped" not in name:
            ways[name]["gb_per_s"] = bench.nbytes / median_s / 1e9
    return {
        "benchmark": "offload",
        "payload_nbytes": bench.nbytes,
        "tensors": len(bench.tensors),
        "bit_exact": bench.exact,
        "host_allocated_nbytes": max(int(one["host_allocated_nbytes"]) for one in rounds),
        "pool_nbytes": bench.offloader.pool_nbytes,
        "freed_nbytes": int(statistics.median(one["freed_nbytes"] for one in rounds)),
        "ways": ways,
        "device": str(bench.backend.device()),
        **provenance("torch"),
    }


def _table(result: dict[str, Any]) -> str:
    size = f"{result['payload_nbytes'] / 1e6:.0f} MB in {result['tensors']} tensors"
    lines = [f"{size}, {result['device']}, {result['hardware']['processor']} ({result['hardware']['cores']} cores)"]
    lines.append(f"{'way':<26}{'median ms':>11}{'GB/s':>8}{'of raw':>8}")
    for name, found in result["ways"].items():
        speed = f"{found['gb_per_s']:>8.2f}{found['of_raw']:>8.2f}" if "gb_per_s" in found else ""
        lines.append(f"{name.replace('_', ' '):<26}{found['median_s'] * 1e3:>11.2f}{speed}")
    lines.append("wall: the caller's clock until the device is idle, with allocating and freeing device memory")
    lines.append(f"device memory freed: {result['freed_nbytes'] / 1e6:.0f} MB")
    held, grown = result["pool_nbytes"] / 1e6, result["host_allocated_nbytes"]
    lines.append(f"host memory held: {held:.0f} MB, and {grown} bytes more after the first calls")
    lines.append("every value came back" if result["bit_exact"] else "A VALUE DID NOT COME BACK")
    return "\n".join(lines)
