"""``hwrl bench offload``: move a model and its optimizer's state to the host and back, beside raw copies."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hwrl import Capability, get_backend
from hwrl_bench.arguments import add_json, positive_float, positive_int
from hwrl_bench.result import machine_line, provenance, report
from hwrl_bench.ways import BenchPlan

if TYPE_CHECKING:
    import torch

    from hwrl import Backend

HELP = "memory offload against raw pinned copies of the same bytes, on this machine"

NBYTES_OF_A_PARAMETER = 12
"""float32, with AdamW's two moments."""

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--gib", type=positive_float, default=1.0, help="parameters and AdamW's state together, GiB (default 1)"
    )
    parser.add_argument("--rounds", type=positive_int, default=9, help="measurements of each way (default 9)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON; fail if values changed or host memory was allocated again."""
    state = _BenchState(get_backend(), nbytes=int(args.gib * (1 << 30)))
    ways = {"raw": state.copy_raw, "per tensor": state.copy_tensors, "hwrl": state.offload}
    rows = BenchPlan(tuple(ways), args.rounds, _WARM_UP).take_turns(lambda way, _: ways[way]())
    rounds = [raw | copies | offload for raw, copies, offload in zip(*rows.values(), strict=True)]
    result = _result(state, rounds)
    report(result, _table(result), json_path=args.json)
    return 0 if result["bit_exact"] and result["host_allocated_nbytes"] == 0 else 1


class _BenchState:
    """A model with its optimizer's state, the same bytes as one flat pair for raw copies, and one round of each way.

    A round returns seconds by name: a name with ``_wall`` by the caller's clock, the others by the device's.
    """

    def __init__(self, backend: Backend, *, nbytes: int) -> None:
        import torch

        from hwrl.memory import Offloader

        self.backend = backend
        self.model = language_model(nbytes // NBYTES_OF_A_PARAMETER, device=backend.device())
        self.optimizer = torch.optim.AdamW(self.model)
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        moments = [value for moments in self.optimizer.state.values() for value in moments.values()]
        self.tensors = [*self.model, *(value for value in moments if value.device == backend.device() and value.dim())]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.offloader = Offloader(self.model, self.optimizer, backend=backend)
        self.flat = torch.zeros(self.nbytes, dtype=torch.uint8, device=backend.device())
        self.pinned = backend.pinned_empty(self.nbytes)
        self.copies: list[torch.Tensor] = []
        self.exact = True

    def copy_raw(self) -> dict[str, float]:
        """Copy all bytes at once, to pinned memory and back."""
        return {
            "raw_offload": self._device_s(lambda: self.pinned.copy_(self.flat, non_blocking=True)),
            "raw_load": self._device_s(lambda: self.flat.copy_(self.pinned, non_blocking=True)),
        }

    def copy_tensors(self) -> dict[str, float]:
        """Change the state, then copy each tensor to the host and back."""
        for tensor in self.tensors:
            tensor.detach().add_(1.0)

        def copy_all() -> list[torch.Tensor]:
            return [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]

        def copy_back() -> None:
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.detach().copy_(copy)

        self.copies, offload_s = self._wall_s(copy_all)
        _, load_s = self._wall_s(copy_back)
        return {"per_tensor_offload_wall": offload_s, "per_tensor_load_wall": load_s}

    def offload(self) -> dict[str, float]:
        """Offload and load the state, then again without a change; compare it with the copies of the tensors."""
        self.backend.empty_cache()  # blocks that the copies left there
        used, held = self._used_nbytes(), self.offloader.pool_nbytes
        moved, offload_wall_s = self._wall_s(self.offloader.offload)
        freed = used - self._used_nbytes()
        loaded, load_wall_s = self._wall_s(self.offloader.load)
        self.exact = self.exact and moved.nbytes >= self.nbytes and self._equals_copies()
        self.copies = []
        skipped, skipped_s = self._wall_s(self.offloader.offload)
        self.exact = self.exact and skipped.nbytes == 0
        _, load_again_s = self._wall_s(self.offloader.load)
        return {
            "offload_wall": offload_wall_s,
            "load_wall": load_wall_s,
            "offload": moved.seconds,
            "load": loaded.seconds,
            "skipped_offload_wall": skipped_s,
            "load_again_wall": load_again_s,
            "freed_nbytes": freed,
            "host_allocated_nbytes": self.offloader.pool_nbytes - held,
        }

    def _equals_copies(self) -> bool:
        import torch

        pairs = zip(self.tensors, self.copies, strict=True)
        return all(torch.equal(tensor, copy.to(tensor.device)) for tensor, copy in pairs)

    def _device_s(self, work: Callable[[], Any]) -> float:
        self.backend.synchronize()
        begin, end = self.backend.event(timing=True), self.backend.event(timing=True)
        stream = self.backend.current_stream()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _wall_s(self, work: Callable[[], Any]) -> tuple[Any, float]:
        self.backend.synchronize()
        begin = time.perf_counter()
        result = work()
        self.backend.synchronize()
        return result, time.perf_counter() - begin

    def _used_nbytes(self) -> int:
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


def _result(state: _BenchState, rounds: list[dict[str, float]]) -> dict[str, Any]:
    seconds = {name: [row[name] for row in rounds] for name in rounds[0] if not name.endswith("nbytes")}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ways = {}
    for name, median_s in medians.items():
        raw_s = medians["raw_load" if "load" in name.replace("offload", "") else "raw_offload"]
        ways[name] = {"median_s": median_s, "of_raw": raw_s / median_s, "seconds": seconds[name]}
        if "skipped" not in name:
            ways[name]["gb_per_s"] = state.nbytes / median_s / 1e9
    return {
        "benchmark": "offload",
        "payload_nbytes": state.nbytes,
        "tensors": len(state.tensors),
        "bit_exact": state.exact,
        "host_allocated_nbytes": max(int(row["host_allocated_nbytes"]) for row in rounds),
        "pool_nbytes": state.offloader.pool_nbytes,
        "freed_nbytes": int(statistics.median(row["freed_nbytes"] for row in rounds)),
        "ways": ways,
        "device": str(state.backend.device()),
        **provenance("torch"),
    }


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['payload_nbytes'] / 1e6:.0f} MB in {result['tensors']} tensors, {machine_line(result)}"]
    lines.append(f"{'way':<26}{'median ms':>11}{'GB/s':>8}{'of raw':>8}")
    for name, row in result["ways"].items():
        speed = f"{row['gb_per_s']:>8.2f}{row['of_raw']:>8.2f}" if "gb_per_s" in row else ""
        lines.append(f"{name.replace('_', ' '):<26}{row['median_s'] * 1e3:>11.2f}{speed}")
    lines.append("wall: the caller's clock until the device is idle, with allocating and freeing device memory")
    lines.append(f"device memory freed: {result['freed_nbytes'] / 1e6:.0f} MB")
    held, grown = result["pool_nbytes"] / 1e6, result["host_allocated_nbytes"]
    lines.append(f"host memory held: {held:.0f} MB, and {grown} bytes more after the first calls")
    lines.append("every value came back" if result["bit_exact"] else "A VALUE DID NOT COME BACK")
    return "\n".join(lines)
