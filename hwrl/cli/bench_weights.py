"""``hwrl bench weights``: the weight link beside raw broadcasts of the same bytes, interleaved in one run."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hwrl.comm import Group
    from hwrl.weights import WeightReceiver, WeightSender

HELP = "weight transfer against raw broadcasts of the same bytes, on this machine"

_WAYS = ("flat broadcast", "per-tensor broadcast", "hwrl device", "hwrl host")
_SMALL_ROUNDS = 60
_HIDDEN, _INTERMEDIATE, _KEY_VALUE = 896, 4864, 128  # the shapes of a common half-billion-parameter model


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--mib", type=int, default=256, help="size of the tensors, MiB (default 256)")
    parser.add_argument("--receivers", type=int, default=1, help="receiving processes (default 1)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each way (default 9)")
    parser.add_argument("--slab-mib", type=int, default=16, help="slab size, MiB (default 16)")
    parser.add_argument("--slabs", type=int, default=4, help="slabs under way at once (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON; fail if any transfer was not bit-exact."""
    from hwrl.comm import serve_store, store_address
    from hwrl.testing.processes import run_processes

    store = serve_store()
    plan = (args.mib, args.rounds, args.slab_mib << 20, args.slabs)
    size = 1 + args.receivers
    sent, *received = run_processes(_measure, size, size, store_address(store), plan, timeout_s=900.0)
    result = _result(args, sent, exact=all(received))
    print(_table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["bit_exact"] else 1


# -- what is sent --------------------------------------------------------------------------------------------------


def _model(nbytes: int) -> list[tuple[str, torch.Tensor]]:
    """Return an LLM-like list of tensors: mostly bfloat16 matrices, and one of each awkward kind."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randint(-9, 9, shape, generator=generator, dtype=torch.int8).to(dtype)

    embed = weight(max(1, nbytes // 5 // (2 * _HIDDEN)), _HIDDEN)
    named = [("embed", embed), ("head", embed), ("scale", weight(dtype=torch.float32)), ("odd", weight(1001))]
    named += [("transposed", weight(_HIDDEN, 333).T), ("strided", weight(77, 9, dtype=torch.float32)[:, ::2])]
    named += [("step", weight(3, dtype=torch.int64)), ("bytes", weight(13, dtype=torch.uint8)), ("empty", weight(0, 4))]
    layer = 0
    while sum(tensor.nbytes for _, tensor in named[1:]) < nbytes:
        named += [(f"layers.{layer}.{name}", weight(*shape)) for name, shape in _LAYER.items()]
        layer += 1
    return named


_LAYER = {
    "q": (_HIDDEN, _HIDDEN),
    "q_bias": (_HIDDEN,),
    "k": (_KEY_VALUE, _HIDDEN),
    "v": (_KEY_VALUE, _HIDDEN),
    "o": (_HIDDEN, _HIDDEN),
    "gate": (_INTERMEDIATE, _HIDDEN),
    "up": (_INTERMEDIATE, _HIDDEN),
    "down": (_HIDDEN, _INTERMEDIATE),
    "norm": (_HIDDEN,),
}


class _Ways:
    """One process's part in each way of moving ``named``; ``change`` gives all tensors new values, alike everywhere."""

    def __init__(self, rank: int, size: int, address: str, plan: tuple[int, int, int, int]) -> None:
        import torch

        from hwrl.comm import Comm, connect_store
        from hwrl.weights import WeightLayout

        mib, self.rounds, self.slab_nbytes, self.slabs = plan
        comm = Comm()
        comm.backend.set_device(rank % max(1, comm.backend.device_count()))
        self.device, self.rank, self.size = comm.backend.device(), rank, size
        self.store = connect_store(address)
        self.group: Group = comm.standalone_group(self.store, rank=rank, size=size, name="raw", timeout_s=300.0)
        self.named = [(name, tensor.to(self.device)) for name, tensor in _model(mib << 20)]
        self.layout = WeightLayout.plan(self.named, slab_nbytes=self.slab_nbytes)
        self.flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self.device)
        self.copies = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for _, tensor in self.named]
        self.ends = {way: self._end(way.removeprefix("hwrl ")) for way in _WAYS if way.startswith("hwrl")}

    def _end(self, transport: Any) -> WeightSender | WeightReceiver:
        from hwrl.weights import WeightReceiver, WeightSender

        if self.rank:
            return WeightReceiver(self.store, name=transport, replica=f"r{self.rank}", slabs=self.slabs)
        sender = WeightSender(
            self.store, name=transport, transport=transport, slab_nbytes=self.slab_nbytes, slabs=self.slabs
        )
        sender.wait_for_receivers(self.size - 1)
        return sender

    def move(self, way: str, version: int) -> Any:
        """Take part in one transfer; return the sender's report, or what the receiver got."""
        if way == "flat broadcast":
            return self.group.broadcast(self.flat, src=0) and self.layout.views(self.flat)
        if way == "per-tensor broadcast":
            for tensor in self.copies:
                self.group.broadcast(tensor, src=0)
            return dict(zip([name for name, _ in self.named], self.copies, strict=True))
        if self.rank == 0:
            return self.ends[way].publish(version, self.named)  # type: ignore[union-attr]  # rank 0 has the senders
        return self.ends[way].receive()  # type: ignore[union-attr]  # the others have the receivers

    def prepare(self, way: str, version: int) -> None:
        """Give the tensors new values, the same in every process; lay them out for the raw broadcasts."""
        from hwrl.comm import raw_bytes

        for tensor in self._memories():
            raw_bytes(tensor).bitwise_xor_(1 + version % 251)
        if self.rank == 0 and way == "flat broadcast":
            for (_, tensor), view in zip(self.named, self.layout.views(self.flat).values(), strict=True):
                view.copy_(tensor)
        if self.rank == 0 and way == "per-tensor broadcast":
            for (_, tensor), copy in zip(self.named, self.copies, strict=True):
                copy.copy_(tensor)

    def _memories(self) -> Iterator[torch.Tensor]:
        for name, tensor in self.named:
            if name != "head":
                yield tensor if tensor._base is None else tensor._base

    def is_exact(self, received: Any) -> bool:
        """Return whether every tensor has the bits that were sent."""
        import torch

        from hwrl.comm import raw_bytes

        return all(
            torch.equal(raw_bytes(received[name].contiguous()), raw_bytes(tensor.contiguous()))
            for name, tensor in self.named
        )

    def timed(self, way: str, version: int) -> tuple[float, Any]:
        """Move one version between two barriers; return the seconds, and what ``move`` returned."""
        self.prepare(way, version)
        self.group.barrier()
        begin = time.perf_counter()
        moved = self.move(way, version)
        self.group.barrier()
        return time.perf_counter() - begin, moved


def _measure(rank: int, size: int, address: str, plan: tuple[int, int, int, int]) -> Any:
    ways = _Ways(rank, size, address, plan)
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    stages: dict[str, list[dict[str, float]]] = {way: [] for way in ways.ends}
    exact = True
    for version in range(ways.rounds + 2):
        for way in _WAYS:
            passed_s, moved = ways.timed(way, version)
            exact = exact and (rank == 0 or ways.is_exact(moved))
            if version > 1 and rank == 0:  # the first two connect, plan and allocate
                seconds[way].append(passed_s)
                stages.get(way, []).append(dict(getattr(moved, "seconds", {})))
    small_s = _measure_small(ways)
    for end in ways.ends.values():
        end.close()
    if rank:
        return exact
    medians = {
        way: {key: statistics.median(one[key] for one in found) for key in found[0]} for way, found in stages.items()
    }
    return seconds, medians, small_s, ways.layout.payload_nbytes, len(ways.named), str(ways.device)


def _measure_small(ways: _Ways) -> list[float]:
    """Publish 0.4 MB again and again: what a transfer costs however small it is."""
    import torch

    from hwrl.weights import WeightReceiver, WeightSender

    named = [(f"small.{number}", torch.zeros(2500, device=ways.device)) for number in range(40)]
    ways.group.barrier()
    if ways.rank:
        with WeightReceiver(ways.store, name="small", replica=f"r{ways.rank}") as receiver:
            while receiver.receive().version < _SMALL_ROUNDS:
                pass
            ways.group.barrier()
        return []
    seconds = []
    with WeightSender(ways.store, name="small") as sender:
        sender.wait_for_receivers(ways.size - 1)
        for version in range(_SMALL_ROUNDS + 1):
            begin = time.perf_counter()
            sender.publish(version, named)
            seconds.append(time.perf_counter() - begin)
        ways.group.barrier()
    return seconds[1:]


# -- the result ----------------------------------------------------------------------------------------------------


def _result(args: argparse.Namespace, sent: Any, *, exact: bool) -> dict[str, Any]:
    from hwrl.cli.provenance import provenance

    seconds, stages, small_s, nbytes, count, device = sent
    flat_s = statistics.median(seconds["flat broadcast"])
    ways = {}
    for way, measured in seconds.items():
        median_s = statistics.median(measured)
        ways[way] = {"median_s": median_s, "gb_per_s": nbytes / median_s / 1e9, "of_flat": flat_s / median_s}
        ways[way] |= {"seconds": measured} | ({"stages_s": stages[way]} if way in stages else {})
    return {
        "benchmark": "weights",
        "payload_nbytes": nbytes,
        "tensors": count,
        "receivers": args.receivers,
        "bit_exact": exact,
        "ways": ways,
        "small_publish_median_s": statistics.median(small_s),
        "bound": _bound(stages["hwrl device"], ways),
        "device": device,
        **provenance("torch"),
    }


def _bound(stages: dict[str, float], ways: dict[str, Any]) -> str:
    name, longest_s = max(stages.items(), key=lambda stage: stage[1])
    share = longest_s / sum(stages.values())
    return f"{share:.0%} of the device transport's time is {name!r}; a flat broadcast has only that part"


def _table(result: dict[str, Any]) -> str:
    size = f"{result['payload_nbytes'] / 1e6:.0f} MB in {result['tensors']} tensors, {result['receivers']} receiver(s)"
    lines = [f"{size}, {result['device']}, {result['hardware']['processor']} ({result['hardware']['cores']} cores)"]
    lines.append(f"{'way':<22}{'median s':>10}{'GB/s':>8}{'of flat':>9}")
    for way, found in result["ways"].items():
        lines.append(f"{way:<22}{found['median_s']:>10.4f}{found['gb_per_s']:>8.2f}{found['of_flat']:>9.2f}")
    for way, found in result["ways"].items():
        if "stages_s" in found:
            parts = ", ".join(f"{stage} {stage_s * 1e3:.1f}" for stage, stage_s in found["stages_s"].items())
            lines.append(f"{way}, ms: {parts}")
    lines.append(f"publishing 0.4 MB: {result['small_publish_median_s'] * 1e3:.2f} ms")
    lines.append(f"bound: {result['bound']}")
    lines.append("every transfer was bit-exact" if result["bit_exact"] else "A TRANSFER WAS NOT BIT-EXACT")
    return "\n".join(lines)
