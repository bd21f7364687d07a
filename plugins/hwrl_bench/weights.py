"""``hwrl bench weights``: the weight link beside raw broadcasts of the same bytes, in turns within one run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwrl.errors import did_you_mean
from hwrl_bench.arguments import add_json, positive_float, positive_int
from hwrl_bench.payloads import DESCRIPTIONS, MIXTURES
from hwrl_bench.result import machine_line, provenance, report, unmeasured_lines
from hwrl_bench.ways import BenchPlan, TransferResult, TransferWay, one_line
from hwrl_bench.weights_peers import PEERS
from hwrl_bench.weights_ways import RAW, WAYS, Needs, TransferSetup
from hwrl_bench.worker import BenchWorker

HELP = "weight transfer against raw broadcasts of the same bytes, on this machine"

_MODELS = (*DESCRIPTIONS, *MIXTURES)
_WARM_UP = 2
_SMALL_ROUNDS = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", choices=_MODELS, default="awkward", help="what is sent (default awkward)")
    parser.add_argument("--mib", type=positive_int, default=256, help="size of the awkward model, MiB (default 256)")
    parser.add_argument("--layers", type=positive_int, default=4, help="of 30b-a3b and tiny-mixture (default 4)")
    parser.add_argument("--receivers", type=positive_int, default=1, help="receiving processes (default 1)")
    parser.add_argument("--senders", type=positive_int, default=1, help="sending processes (default 1)")
    parser.add_argument("--rounds", type=positive_int, default=9, help="measurements of each way (default 9)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=f"only these of: {', '.join(WAYS)}")
    parser.add_argument("--bucket-mib", type=positive_int, help="bucket size, MiB (default: what suits the device)")
    parser.add_argument("--buckets", type=positive_int, default=4, help="buckets under way at once (default 4)")
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


def _peer(name: str) -> str:
    if name == "all" or name in PEERS:
        return name
    known = did_you_mean(name, PEERS, otherwise=f"choose all, or some of {', '.join(PEERS)}")
    raise argparse.ArgumentTypeError(f"there is no peer {name!r}; {known}")


@dataclass(frozen=True)
class TransferWorkload:
    """The tensors to send by so many ``senders`` in buckets; ``bucket_nbytes`` None is the transport's choice."""

    model: str
    nbytes: int
    bucket_nbytes: int | None
    buckets: int
    senders: int = 1
    layers: int = 4


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON; fail if any transfer was not bit-exact."""
    from hwrl.comm import serve_store, store_address
    from hwrl.testing import run_processes

    store, size = serve_store(), args.senders + args.receivers
    bucket_nbytes = None if args.bucket_mib is None else args.bucket_mib << 20
    workload = TransferWorkload(args.model, args.mib << 20, bucket_nbytes, args.buckets, args.senders, args.layers)
    ways = _usable_ways(args.ways or tuple(WAYS), size=size)
    if args.senders > 1:  # only the device transport has several
        ways = tuple(way for way in ways if way in RAW or way.startswith("hwrl device"))
    plan = BenchPlan(ways, args.rounds, _WARM_UP)
    ranks = run_processes(measure, size, size, store_address(store), plan, workload, timeout_s=900.0)
    result = _result(args, ranks)
    names = PEERS if "all" in args.peers else dict.fromkeys(args.peers)
    result["peers"] = {name: _measure_peer(name, size, plan, workload, timeout_s=args.peer_timeout) for name in names}
    report(result, _table(result), json_path=args.json)
    return 0 if result["bit_exact"] else 1


def _usable_ways(wanted: Sequence[str], *, size: int) -> tuple[str, ...]:
    """Return the wanted ways and the raw ones, without those that do not work on this machine."""
    from hwrl import Capability, get_backend

    backend = get_backend()
    apart = size <= backend.device_count() or backend.supports(Capability.SHARED_DEVICE_GROUPS).usable
    grouped = apart and backend.supports(Capability.COLLECTIVES).usable
    ipc = backend.supports(Capability.DEVICE_IPC).usable
    usable = {Needs.GROUP: grouped, Needs.NO_GROUP: not grouped, Needs.IPC: ipc, Needs.NOTHING: True}
    return tuple(way for way, (needs, _) in WAYS.items() if usable[needs] and (way in wanted or way in RAW))


def _measure_peer(
    name: str, size: int, plan: BenchPlan, workload: TransferWorkload, *, timeout_s: float
) -> dict[str, Any]:
    """Return the rates of a peer and of the raw ways in turns with it, or the reason why there are none.

    The peer has processes of its own: if it hangs or breaks, nothing else does.
    """
    from hwrl.comm import serve_store, store_address

    peer, store = PEERS[name], serve_store()
    raw = tuple(way for way in plan.ways if way in RAW)
    why_not = peer.why_not()
    if why_not is None and "copy on the device" in raw:
        why_not = f"it needs a device for each of the {size} processes"
    if why_not is not None:
        return {"why_not": why_not}
    plan = replace(plan, ways=(*raw, name))
    try:
        ranks = peer.run(measure, size, store_address(store), plan, workload, timeout_s=timeout_s)
    except Exception as exc:  # noqa: BLE001 - another package may fail in any way; its row says how
        return {"version": peer.version(), "why_not": one_line(exc)}
    return {"version": peer.version(), "ways": _rates(ranks)}


# -- one process ---------------------------------------------------------------------------------------------------


def measure(rank: int, size: int, address: str, plan: BenchPlan, workload: TransferWorkload) -> dict[str, Any]:
    """Take part in every way of the plan as ``rank`` of ``size``; return this process's measurements."""
    process = _TransferProcess(_set_up(rank, size, address, plan, workload), plan)
    rows = plan.take_turns(process.measure)
    small_s = [] if set(plan.ways) & PEERS.keys() else _measure_small(process)
    process.close()
    payload = process.setup.payload
    model = {
        "payload_nbytes": payload.layout.payload_nbytes,
        "tensors": len(payload.named),
        "device": str(payload.device),
    }
    return {"rows": rows, "exact": process.exact, "small_s": small_s, "model": model}


def _set_up(rank: int, size: int, address: str, plan: BenchPlan, workload: TransferWorkload) -> TransferSetup:
    from hwrl.comm import Comm
    from hwrl_bench.weights_payload import BenchPayload

    comm = Comm()
    comm.backend.set_device(rank % max(1, comm.backend.device_count()))
    worker = BenchWorker.connect(rank, size, address, comm.backend)
    group = None
    if "copy on the device" not in plan.ways:
        group = comm.standalone_group(worker.store, rank=rank, size=size, name="raw", timeout_s=300.0)
    payload = BenchPayload(workload.model, nbytes=workload.nbytes, layers=workload.layers, device=comm.backend.device())
    trainers, receivers, senders = None, size - workload.senders, workload.senders
    if senders > 1 and not 0 < rank <= receivers:
        own = max(0, rank - receivers)
        trainers = comm.standalone_group(worker.store, rank=own, size=senders, name="trainers", timeout_s=300.0)
    return TransferSetup(worker, payload, group, workload.bucket_nbytes, workload.buckets, trainers)


class _TransferProcess:
    """One process's ends of all ways."""

    def __init__(self, setup: TransferSetup, plan: BenchPlan) -> None:
        self.setup, self.backend = setup, setup.worker.backend
        self.exact = dict.fromkeys(plan.ways, True)
        self._ways: dict[str, TransferWay] = {way: _make(way, setup) for way in plan.ways}

    def measure(self, name: str, number: int) -> dict[str, Any]:
        """Move one version between two barriers; compare the bits that arrived.

        ``wall_s`` is all of it by this process's clock, ``device_s`` the transfer of the bytes by the device's.
        """
        way, rank, stream = self._ways[name], self.setup.worker.rank, self.backend.current_stream()
        self.setup.payload.change()
        way.prepare()
        begun, ended = self.backend.event(timing=True), self.backend.event(timing=True)
        self.barrier()
        begin = time.perf_counter()
        begun.record(stream)
        moved: TransferResult = way.receive(number) if rank else way.send(number)
        ended.record(stream)
        self.barrier()
        wall_s = time.perf_counter() - begin
        self.backend.synchronize()
        device_s = moved.transfer_s or begun.elapsed_time(ended) / 1000
        if moved.tensors is not None:
            self.exact[name] &= self.setup.payload.is_equal(moved.tensors)
        return {"wall_s": wall_s, "device_s": device_s, "stages": dict(moved.stages)}

    def barrier(self) -> None:
        """Wait until every process is here and its device is idle."""
        if self.setup.group is None:
            self.setup.worker.barrier()
        else:
            self.backend.synchronize()
            self.setup.group.barrier()

    def close(self) -> None:
        """Close every way."""
        for way in self._ways.values():
            way.close()


def _make(way: str, setup: TransferSetup) -> TransferWay:
    return PEERS[way](setup) if way in PEERS else WAYS[way][1](setup)


def _measure_small(process: _TransferProcess) -> list[float]:
    """Publish 0.4 MB many times; return the seconds of each: the least time of a transfer, however small it is."""
    import torch

    from hwrl import Capability
    from hwrl.weights import WeightReceiver, WeightSender

    worker = process.setup.worker
    named = [(f"small.{number}", torch.zeros(2500, device=process.backend.device())) for number in range(40)]
    process.barrier()
    if worker.rank:
        with WeightReceiver(worker.store, name="small", replica=f"r{worker.rank}") as receiver:
            while receiver.receive().version < _SMALL_ROUNDS:
                pass
            process.barrier()
        return []
    ipc = process.backend.supports(Capability.DEVICE_IPC).usable
    transport: Any = "device" if process.setup.group is not None else "ipc" if ipc else "host"
    seconds = []
    with WeightSender(worker.store, name="small", transport=transport) as sender:
        sender.wait_for_receivers(worker.size - 1)
        for version in range(_SMALL_ROUNDS + 1):
            begin = time.perf_counter()
            sender.publish(version, named)
            seconds.append(time.perf_counter() - begin)
        process.barrier()
    return seconds[1:]


# -- the result ----------------------------------------------------------------------------------------------------


def _result(args: argparse.Namespace, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    first, ways = ranks[0], _rates(ranks)
    return {
        "benchmark": "weights",
        **first["model"],
        "receivers": args.receivers,
        "senders": args.senders,
        "bit_exact": all(row["bit_exact"] for row in ways.values()),
        "ways": ways,
        "small_publish_median_s": statistics.median(first["small_s"]),
        **provenance("torch"),
    }


def _rates(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of each way, and its rates beside the fastest raw way."""
    nbytes = ranks[0]["model"]["payload_nbytes"]
    ways = {way: _way_times([rank["rows"][way] for rank in ranks], nbytes) for way in ranks[0]["rows"]}
    raw = [row for way, row in ways.items() if way in RAW]
    raw_wall_s, raw_device_s = (min(row[key] for row in raw) for key in ("wall_median_s", "device_median_s"))
    for way, row in ways.items():
        row["bit_exact"] = all(rank["exact"][way] for rank in ranks)
        row["of_raw"] = raw_wall_s / row["wall_median_s"]
        row["of_raw_on_device"] = raw_device_s / row["device_median_s"]
    return ways


def _way_times(ranks: list[list[dict[str, Any]]], nbytes: int) -> dict[str, Any]:
    """Return one way's medians. A round's wall time is the sender's; its device time is the slowest process's."""
    sender = ranks[0]
    wall_s = [row["wall_s"] for row in sender]
    device_s = [max(row["device_s"] for row in rows) for rows in zip(*ranks, strict=True)]
    return {
        "wall_median_s": statistics.median(wall_s),
        "device_median_s": statistics.median(device_s),
        "gb_per_s": nbytes / statistics.median(device_s) / 1e9,
        "wall_s": wall_s,
        "device_s": device_s,
        "stages_s": {key: statistics.median(row["stages"][key] for row in sender) for key in sender[0]["stages"]},
    }


def _table(result: dict[str, Any]) -> str:
    size = f"{result['payload_nbytes'] / 1e6:.0f} MB in {result['tensors']} tensors, "
    size += f"{result['senders']} sender(s), {result['receivers']} receiver(s)"
    lines = [f"{size}, {machine_line(result)}"]
    lines.append(f"{'':<24}{'on the device':^28}{'with rendezvous and votes':^28}")
    lines.append(f"{'way':<24}{'median s':>10}{'GB/s':>8}{'of raw':>9}{'median s':>14}{'of raw':>9}")
    measured = {name: peer for name, peer in result["peers"].items() if "ways" in peer}
    ways = result["ways"] | {f"{name} {peer['version']}": peer["ways"][name] for name, peer in measured.items()}
    for way, row in ways.items():
        device = f"{row['device_median_s']:>10.4f}{row['gb_per_s']:>8.2f}{row['of_raw_on_device']:>9.3f}"
        lines.append(f"{way:<24}{device}{row['wall_median_s']:>14.4f}{row['of_raw']:>9.3f}")
    for way, row in result["ways"].items():
        if row["stages_s"]:
            parts = ", ".join(f"{stage} {stage_s * 1e3:.1f}" for stage, stage_s in row["stages_s"].items())
            lines.append(f"{way}, ms of the sender's host: {parts}")
    if measured:
        lines.append(f"{', '.join(measured)}: in processes of their own, of the raw broadcasts in those")
    lines += unmeasured_lines(result["peers"])
    lines.append(f"publishing 0.4 MB: {result['small_publish_median_s'] * 1e3:.2f} ms")
    wrong = ", ".join(way for way, row in ways.items() if not row["bit_exact"])
    lines.append(f"NOT BIT-EXACT: {wrong}" if wrong else "every transfer was bit-exact")
    return "\n".join(lines)
