"""``hwrl bench weights``: the weight link beside raw broadcasts of the same bytes, interleaved in one run."""

from __future__ import annotations

import argparse
import difflib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hwrl.cli.arguments import add_json, positive_float, positive_int, write_json
from hwrl.cli.bench_peers import PEERS, Seat, one_line

if TYPE_CHECKING:
    import torch

    from hwrl.comm import Group
    from hwrl.weights import TransportName, WeightReceiver, WeightSender

    Described = tuple[str, tuple[int, ...], torch.dtype]

HELP = "weight transfer against raw broadcasts of the same bytes, on this machine"

_WAYS = (
    "flat broadcast",
    "flat broadcast in pieces",
    "copy on the device",
    "per-tensor broadcast",
    "hwrl device",
    "hwrl device in place",
    "hwrl device flat",
    "hwrl ipc in place",
    "hwrl host",
)
"""``pieces``: of 1 GiB; one of tens of gigabytes may be slower. ``in place``: into the receiver's own tensors.
``flat``: that, and the tensors of both sides lie in one storage."""
_RAW = _WAYS[:3]
"""What the others are compared with; the copy only where processes share a device, and cannot share a group."""
_MEDIANS = ("wall_median_s", "device_median_s")
_SMALL_ROUNDS = 60
_HIDDEN, _INTERMEDIATE, _KEY_VALUE = 896, 4864, 128  # the shapes of a common half-billion-parameter model


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", choices=sorted(_MODELS), default="awkward", help="what is sent (default awkward)")
    parser.add_argument("--mib", type=positive_int, default=256, help="size of the awkward model, MiB (default 256)")
    parser.add_argument("--receivers", type=positive_int, default=1, help="receiving processes (default 1)")
    parser.add_argument("--rounds", type=positive_int, default=9, help="measurements of each way (default 9)")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, metavar="WAY", help=f"only these of: {', '.join(_WAYS)}")
    parser.add_argument("--slab-mib", type=positive_int, help="slab size, MiB (default: what suits the device)")
    parser.add_argument("--slabs", type=positive_int, default=4, help="slabs under way at once (default 4)")
    parser.add_argument(
        "--peers",
        nargs="+",
        type=_peer,
        default=[],
        metavar="PACKAGE",
        help=f"also measure these packages' own ways, where they are installed: all, or some of {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--peer-timeout",
        type=positive_float,
        default=180.0,
        metavar="SECONDS",
        help="give a peer up after this (default 180)",
    )
    add_json(parser)


@dataclass(frozen=True)
class _Plan:
    model: str
    mib: int
    rounds: int
    ways: tuple[str, ...]
    slab_nbytes: int | None
    slabs: int
    peer: str | None = None


def _peer(name: str) -> str:
    if name == "all" or name in PEERS:
        return name
    close = difflib.get_close_matches(name, PEERS, n=1)
    known = f"did you mean {close[0]!r}?" if close else f"choose all, or some of {', '.join(PEERS)}"
    raise argparse.ArgumentTypeError(f"there is no peer {name!r}; {known}")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON; fail if any transfer was not bit-exact."""
    from hwrl.comm import serve_store, store_address
    from hwrl.testing.processes import run_processes

    store = serve_store()
    slab_nbytes = None if args.slab_mib is None else args.slab_mib << 20
    ways = _ways(args.ways or _WAYS, processes=1 + args.receivers)
    plan = _Plan(args.model, args.mib, args.rounds, ways, slab_nbytes, args.slabs)
    size = 1 + args.receivers
    result = _result(args, run_processes(_measure, size, size, store_address(store), plan, timeout_s=900.0))
    names = PEERS if "all" in args.peers else dict.fromkeys(args.peers)
    result["peers"] = {name: _measure_peer(name, size, plan, timeout_s=args.peer_timeout) for name in names}
    print(_table(result))
    write_json(args.json, result)
    return 0 if result["bit_exact"] else 1


def _ways(wanted: Sequence[str], *, processes: int) -> tuple[str, ...]:
    """Return the ways that work here, of those that are ``wanted`` and the raw ones."""
    from hwrl.discovery import get_backend
    from hwrl.interfaces import Capability

    backend = get_backend()
    ipc = backend.supports(Capability.DEVICE_IPC).usable
    apart = processes <= backend.device_count() or backend.supports(Capability.SHARED_DEVICE_GROUPS).usable
    grouped = apart and backend.supports(Capability.COLLECTIVES).usable
    usable = {way: ipc or way == "hwrl host" if "ipc" in way or "host" in way else grouped for way in _WAYS}
    usable["copy on the device"] = not grouped
    return tuple(way for way in _WAYS if usable[way] and (way in wanted or way in _RAW))


def _measure_peer(name: str, size: int, plan: _Plan, *, timeout_s: float) -> dict[str, Any]:
    """Return a peer's rates beside the raw ones, in turns with them in processes of their own; or why there are none.

    Of their own, so that a peer that hangs or breaks takes nothing else along.
    """
    from hwrl.comm import serve_store, store_address

    peer, store = PEERS[name], serve_store()
    raw = tuple(way for way in plan.ways if way in _RAW)
    why_not = peer.why_not()
    if why_not is None and "copy on the device" in raw:
        why_not = f"it needs a device for each of the {size} processes"
    if why_not is not None:
        return {"why_not": why_not}
    plan = replace(plan, ways=(*raw, name), peer=name)
    try:
        ranks = peer.run(_measure, size, store_address(store), plan, timeout_s=timeout_s)
    except Exception as exc:  # noqa: BLE001 - another package may fail in any way; its row says how
        return {"version": peer.version(), "why_not": one_line(exc)}
    return {"version": peer.version(), "ways": _rates(ranks)}


# -- what is sent --------------------------------------------------------------------------------------------------


def _awkward(nbytes: int) -> Iterator[Described]:
    """An LLM-like list: mostly bfloat16 matrices, and one of each awkward kind."""
    import torch

    yield from _of({"embed": (max(1, nbytes // 5 // (2 * _HIDDEN)), _HIDDEN), "odd": (1001,), "empty": (0, 4)})
    yield from _of({"scale": (), "strided": (77, 9)}, torch.float32)
    yield from _of({"transposed": (_HIDDEN, 333)})
    yield "step", (3,), torch.int64
    yield "bytes", (13,), torch.uint8
    left = nbytes * 4 // 5
    layer = 0
    while left > 0:
        for name, shape in _LAYER.items():
            yield f"layers.{layer}.{name}", shape, torch.bfloat16
            left -= 2 * math.prod(shape)
        layer += 1


def _of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype | None = None) -> Iterator[Described]:
    import torch

    yield from ((name, shape, dtype or torch.bfloat16) for name, shape in shapes.items())


def _dense(_: int) -> Iterator[Described]:
    """399 tensors, 16.4 GB: the shapes of an 8-billion-parameter model."""
    yield from _of({"embed": (151936, 4096)})
    layer: dict[str, tuple[int, ...]] = {
        "q": (4096, 4096),
        "k": (1024, 4096),
        "v": (1024, 4096),
        "o": (4096, 4096),
        "q_norm": (128,),
    }
    layer |= {"k_norm": (128,), "gate": (12288, 4096), "up": (12288, 4096), "down": (4096, 12288)}
    layer |= {"input_norm": (4096,), "post_norm": (4096,)}
    for number in range(36):
        yield from _of({f"layers.{number}.{name}": shape for name, shape in layer.items()})
    yield from _of({"norm": (4096,), "head": (151936, 4096)})


def _experts(_: int) -> Iterator[Described]:
    """18,819 tensors, 31 GB: a mixture of 128 small experts in each of 48 layers."""
    yield from _of({"embed": (151936, 2048)})
    attention: dict[str, tuple[int, ...]] = {
        "q": (4096, 2048),
        "k": (512, 2048),
        "v": (512, 2048),
        "o": (2048, 4096),
        "router": (128, 2048),
    }
    attention |= {"input_norm": (2048,), "post_norm": (2048,), "q_norm": (128,)}
    for number in range(48):
        yield from _of({f"layers.{number}.{name}": shape for name, shape in attention.items()})
        for expert in range(128):
            matrices = {"gate": (384, 2048), "up": (384, 2048), "down": (2048, 384)}
            yield from _of({f"layers.{number}.experts.{expert}.{name}": shape for name, shape in matrices.items()})
    yield from _of({"norm": (2048,), "head": (151936, 2048)})


_MODELS = {"awkward": _awkward, "8b": _dense, "moe": _experts}


def _make(plan: _Plan, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Return the model's tensors on ``device``, with values that are the same in every process."""
    import torch

    from hwrl.comm import raw_bytes

    described = list(_MODELS[plan.model](plan.mib << 20))
    noise = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    named = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in described]
    for number, (_, tensor) in enumerate(named):
        for part in raw_bytes(tensor).split(len(noise) - 4096):
            part.copy_(noise[number % 4096 :][: len(part)])
    changed = {"transposed": lambda tensor: tensor.T, "strided": lambda tensor: tensor[:, ::2]}
    named = [(name, changed[name](tensor) if name in changed else tensor) for name, tensor in named]
    return [*named, ("tied", named[0][1])] if plan.model == "awkward" else named


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
    """One process's part in each way of moving ``named``; ``prepare`` changes all values, alike everywhere."""

    def __init__(self, rank: int, size: int, address: str, plan: _Plan) -> None:
        import torch

        from hwrl.comm import Comm, connect_store
        from hwrl.interfaces import Capability
        from hwrl.weights import WeightLayout

        comm = Comm()
        self.plan, self.rank, self.size, self.backend = plan, rank, size, comm.backend
        self.backend.set_device(rank % max(1, self.backend.device_count()))
        self.device = self.backend.device()
        self.store = connect_store(address)
        self.peer = PEERS[plan.peer](Seat.take(rank, size, address, self.backend)) if plan.peer else None
        self.group: Group | None = None
        if "copy on the device" not in plan.ways:
            self.group = comm.standalone_group(self.store, rank=rank, size=size, name="raw", timeout_s=300.0)
        ipc = self.backend.supports(Capability.DEVICE_IPC).usable
        self.smallest: TransportName = "device" if self.group is not None else "ipc" if ipc else "host"
        self._meetings = 0
        self.named = _make(plan, self.device)
        self.layout = WeightLayout.plan(self.named, flat=True)
        self.flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self.device)
        self.views = self.layout.views(self.flat)
        self.spare = torch.empty_like(self.flat) if self.group is None and rank == 0 else None
        copied = "per-tensor broadcast" in plan.ways or (rank and any(way.endswith("in place") for way in plan.ways))
        self.copies = {
            name: torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            for name, tensor in (self.named if copied else ())
        }
        self.ends = {way: self._end(way) for way in plan.ways if way.startswith("hwrl")}

    def _end(self, way: str) -> WeightSender | WeightReceiver:
        from hwrl.weights import WeightReceiver, WeightSender

        slabs, name = self.plan.slabs, way.replace(" ", "-")
        if self.rank:
            into = {"place": self.copies, "flat": self.views}.get(way.split()[-1])
            return WeightReceiver(self.store, name=name, replica=f"r{self.rank}", into=into, slabs=slabs)
        transport: Any = way.split()[1]
        sender = WeightSender(
            self.store, name=name, transport=transport, slab_nbytes=self.plan.slab_nbytes, slabs=slabs, timeout_s=300.0
        )
        sender.wait_for_receivers(self.size - 1)
        return sender

    def move(self, way: str, version: int) -> Any:
        """Take part in one transfer; return the sender's report, or what the receiver got."""
        if way == "copy on the device":
            if self.spare is not None:
                self.spare.copy_(self.flat)
            return self.views
        if way.startswith("flat"):
            pieces = self.flat.split(1 << 30) if way.endswith("pieces") else [self.flat]
            self._broadcast(pieces)
            return self.views
        if way == "per-tensor broadcast":
            self._broadcast(self.copies.values())
            return self.copies
        if self.peer is not None:
            if self.rank:
                self.peer.receive(self.views)
            else:
                self.peer.send()
            self.backend.synchronize()  # it has streams of its own
            return self.views
        if self.rank:
            return self.ends[way].receive()  # type: ignore[union-attr]  # these ranks have the receivers
        named = self.views.items() if way.endswith("flat") else self.named
        return self.ends[way].publish(version, named)  # type: ignore[union-attr]  # rank 0 has the senders

    def meet(self) -> None:
        """Wait until every process is here and its device is idle."""
        from hwrl.comm import await_keys

        self.backend.synchronize()
        if self.group is not None:
            self.group.barrier()
            return
        self._meetings += 1
        self.store.set(f"meeting/{self._meetings}/{self.rank}", "")
        await_keys(self.store, [f"meeting/{self._meetings}/{peer}" for peer in range(self.size)], timeout_s=300.0)

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        assert self.group is not None, "only where there is one"
        for pending in [self.group.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
            pending.wait()

    def prepare(self, way: str, version: int) -> None:
        """Give the tensors new values, the same in every process; lay them out for the raw broadcasts."""
        from hwrl.comm import raw_bytes

        for tensor in self._memories():
            raw_bytes(tensor).bitwise_xor_(1 + version % 251)
        if self.rank == 0 and ("flat" in way or way == "copy on the device"):
            for (_, tensor), view in zip(self.named, self.views.values(), strict=True):
                view.copy_(tensor)
        if self.rank == 0 and way == "per-tensor broadcast":
            for name, tensor in self.named:
                self.copies[name].copy_(tensor)
        if self.peer is not None and way == self.plan.peer:
            self.peer.prepare({name: tensor.contiguous() for name, tensor in self.named})

    def _memories(self) -> Iterator[torch.Tensor]:
        for name, tensor in self.named:
            if name != "tied":
                yield tensor if tensor._base is None else tensor._base

    def is_exact(self, received: Any) -> bool:
        """Return whether every tensor has the bits that were sent."""
        import torch

        from hwrl.comm import raw_bytes

        return all(
            torch.equal(raw_bytes(received[name].contiguous()), raw_bytes(tensor.contiguous()))
            for name, tensor in self.named
        )

    def timed(self, way: str, version: int) -> tuple[float, float, Any]:
        """Move one version between two barriers.

        Returns the seconds of all of it by this process's clock, those of the bytes by its device's, and what ``move``
        returned.
        """
        self.prepare(way, version)
        self.backend.synchronize()
        self.meet()
        begun, ended, stream = (*(self.backend.event(timing=True) for _ in range(2)), self.backend.current_stream())
        begin = time.perf_counter()
        begun.record(stream)
        moved = self.move(way, version)
        ended.record(stream)
        self.meet()
        passed_s = time.perf_counter() - begin
        self.backend.synchronize()
        transfer_s = getattr(moved, "transfer_s", 0.0)  # of what is measured inside hwrl
        return passed_s, transfer_s or begun.elapsed_time(ended) / 1000, moved


def _measure(rank: int, size: int, address: str, plan: _Plan) -> dict[str, Any]:
    ways = _Ways(rank, size, address, plan)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in plan.ways}
    exact = dict.fromkeys(plan.ways, True)
    for version in range(plan.rounds + 2):
        for way in plan.ways:
            wall_s, device_s, moved = ways.timed(way, version)
            exact[way] = exact[way] and (rank == 0 or way == "copy on the device" or ways.is_exact(moved))
            if version > 1:  # the first two connect, plan and allocate
                stages = dict(getattr(moved, "seconds", {}))
                found[way].append({"wall_s": wall_s, "device_s": device_s, "stages": stages})
    small_s = [] if plan.peer else _measure_small(ways)
    for end in (*ways.ends.values(), *filter(None, [ways.peer])):
        end.close()
    model = {"payload_nbytes": ways.layout.payload_nbytes, "tensors": len(ways.named), "device": str(ways.device)}
    return {"found": found, "exact": exact, "small_s": small_s, "model": model}


def _measure_small(ways: _Ways) -> list[float]:
    """Publish 0.4 MB again and again: what a transfer costs however small it is."""
    import torch

    from hwrl.weights import WeightReceiver, WeightSender

    named = [(f"small.{number}", torch.zeros(2500, device=ways.device)) for number in range(40)]
    ways.meet()
    if ways.rank:
        with WeightReceiver(ways.store, name="small", replica=f"r{ways.rank}") as receiver:
            while receiver.receive().version < _SMALL_ROUNDS:
                pass
            ways.meet()
        return []
    seconds = []
    with WeightSender(ways.store, name="small", transport=ways.smallest) as sender:
        sender.wait_for_receivers(ways.size - 1)
        for version in range(_SMALL_ROUNDS + 1):
            begin = time.perf_counter()
            sender.publish(version, named)
            seconds.append(time.perf_counter() - begin)
        ways.meet()
    return seconds[1:]


# -- the result ----------------------------------------------------------------------------------------------------


def _result(args: argparse.Namespace, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    from hwrl.cli.provenance import provenance

    first, ways = ranks[0], _rates(ranks)
    return {
        "benchmark": "weights",
        **first["model"],
        "receivers": args.receivers,
        "bit_exact": all(found["bit_exact"] for found in ways.values()),
        "ways": ways,
        "small_publish_median_s": statistics.median(first["small_s"]),
        **provenance("torch"),
    }


def _rates(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what each way reached, and beside the faster of the raw ones."""
    first, nbytes = ranks[0], ranks[0]["model"]["payload_nbytes"]
    ways = {way: _of_way([rank["found"][way] for rank in ranks], nbytes) for way in first["found"]}
    raw = {key: min(ways[way][key] for way in _RAW if way in ways) for key in _MEDIANS}
    for way, found in ways.items():
        found["bit_exact"] = all(rank["exact"][way] for rank in ranks)
        found["of_raw"] = raw["wall_median_s"] / found["wall_median_s"]
        found["of_raw_on_device"] = raw["device_median_s"] / found["device_median_s"]
    return ways


def _of_way(ranks: list[list[dict[str, Any]]], nbytes: int) -> dict[str, Any]:
    """Return one way's medians: a round's wall time is the sender's, its time on the devices that of the slowest."""
    sender, rounds = ranks[0], range(len(ranks[0]))
    wall_s = [sender[number]["wall_s"] for number in rounds]
    device_s = [max(rank[number]["device_s"] for rank in ranks) for number in rounds]
    stages = {key: statistics.median(one["stages"][key] for one in sender) for key in sender[0]["stages"]}
    return {
        "wall_median_s": statistics.median(wall_s),
        "device_median_s": statistics.median(device_s),
        "gb_per_s": nbytes / statistics.median(device_s) / 1e9,
        "wall_s": wall_s,
        "device_s": device_s,
        "stages_s": stages,
    }


def _table(result: dict[str, Any]) -> str:
    size = f"{result['payload_nbytes'] / 1e6:.0f} MB in {result['tensors']} tensors, {result['receivers']} receiver(s)"
    lines = [f"{size}, {result['device']}, {result['hardware']['processor']} ({result['hardware']['cores']} cores)"]
    lines.append(f"{'':<24}{'on the device':^28}{'with rendezvous and votes':^28}")
    lines.append(f"{'way':<24}{'median s':>10}{'GB/s':>8}{'of raw':>9}{'median s':>14}{'of raw':>9}")
    measured = {name: peer for name, peer in result["peers"].items() if "ways" in peer}
    ways = result["ways"] | {f"{name} {peer['version']}": peer["ways"][name] for name, peer in measured.items()}
    for way, found in ways.items():
        device = f"{found['device_median_s']:>10.4f}{found['gb_per_s']:>8.2f}{found['of_raw_on_device']:>9.3f}"
        lines.append(f"{way:<24}{device}{found['wall_median_s']:>14.4f}{found['of_raw']:>9.3f}")
    for way, found in result["ways"].items():
        if found["stages_s"]:
            parts = ", ".join(f"{stage} {stage_s * 1e3:.1f}" for stage, stage_s in found["stages_s"].items())
            lines.append(f"{way}, ms of the sender's host: {parts}")
    if measured:
        lines.append(f"{', '.join(measured)}: in processes of their own, of the raw broadcasts in those")
    lines += [
        f"{name}: not measured: {peer['why_not']}" for name, peer in result["peers"].items() if "ways" not in peer
    ]
    lines.append(f"publishing 0.4 MB: {result['small_publish_median_s'] * 1e3:.2f} ms")
    wrong = ", ".join(way for way, found in ways.items() if not found["bit_exact"])
    lines.append(f"NOT BIT-EXACT: {wrong}" if wrong else "every transfer was bit-exact")
    return "\n".join(lines)
