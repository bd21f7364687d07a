"""Measure several senders of weights over slow links: each process is a host of its own, in a network namespace.

    python ci/senders.py --senders 1 2 --gbit 1

Needs Linux, iproute2 with tc, nsenter, and the right to make network namespaces (``unshare -Urn`` gives it to users).
Prints the seconds of a version for each number of senders. Exit status 77: it cannot run here, and says why.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hwrl.comm import Comm, Group, await_keys, connect_store, serve_store, store_address
from hwrl.testing.processes import Processes
from hwrl.weights import WeightReceiver, WeightSender, WeightShard, WeightSource, gather_weights

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
_CANNOT_RUN = 77
_INTERFACE, _SWITCH = "hwrl0", "hwrlswitch"
_TENSOR_NBYTES = 4 << 20
_WARM_UP = 1


def main() -> int:
    """Measure, and print a table."""
    options = _parse()
    why_not = _why_not()
    if why_not is not None:
        print(f"network namespaces cannot be used here: {why_not}")
        return _CANNOT_RUN
    rows = {senders: measure(senders, options) for senders in options.senders}
    first = next(iter(rows.values()))
    print(
        f"{options.mib} MiB, {options.ranks} trainer ranks with {options.gbit:g} Gbit/s each, {options.receivers} "
        f"receiver(s) with {options.gbit * options.ranks:g} Gbit/s, {'shards' if options.sharded else 'replicas'}"
    )
    for senders, seconds in rows.items():
        rate = options.mib * 1.048576 * 8e-3 / seconds
        print(f"{senders} sender(s): {seconds:.3f} s, {rate:.2f} Gbit/s, {first / seconds:.2f} of the first")
    if options.json:
        options.json.write_text(json.dumps({"seconds": rows, "mib": options.mib, "gbit": options.gbit}))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 2], help="numbers to measure (default 1 2)")
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks (default 2)")
    parser.add_argument("--receivers", type=int, default=1, help="receivers (default 1)")
    parser.add_argument("--gbit", type=float, default=1.0, help="each trainer rank's link, Gbit/s (default 1)")
    parser.add_argument("--mib", type=int, default=64, help="size of a version, MiB (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="measured versions (default 3)")
    parser.add_argument("--sharded", action="store_true", help="ranks hold shards, and gather them over the same links")
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser.parse_args()


def _why_not() -> str | None:
    """Return why namespaces cannot be made, or None. Moves this process into one: it holds the switch."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    try:
        _leave_network()
        _run("ip", "link", "add", _SWITCH, "type", "bridge")
        _run("ip", "link", "set", _SWITCH, "up")
        _run("tc", "qdisc", "add", "dev", _SWITCH, "root", "tbf", "rate", "1gbit", "burst", "1mb", "latency", "50ms")
        _run("tc", "qdisc", "del", "dev", _SWITCH, "root")
    except OSError as exc:
        return str(exc)
    except subprocess.CalledProcessError as exc:
        return f"{' '.join(exc.cmd)}: {exc.stderr.decode().strip()}"
    return None


def _leave_network() -> None:
    """Move this thread and its later threads into a new network namespace without any interface."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run(*words: str, host: int | None = None) -> None:
    inside = [] if host is None else ["nsenter", "--target", str(host), "--net"]
    subprocess.run([*inside, *words], check=True, capture_output=True)


# -- the hosts ------------------------------------------------------------------------------------------------------


def measure(senders: int, options: argparse.Namespace) -> float:
    """Return the median seconds of a version with so many senders."""
    size = options.ranks + options.receivers
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        with Processes(host, size, home, senders, options, timeout_s=300.0) as processes:
            for rank in range(size):
                gbit = options.gbit * (1 if rank < options.ranks else options.ranks)
                _connect(f"hwrl-{senders}-{rank}", rank, int(_await(home / f"pid-{rank}")), gbit=gbit)
            (home / "connected").write_text("now")
            ended = [processes.wait(rank) for rank in range(size)]
    for rank in range(size):  # the next hosts have the same addresses, and a dead namespace may stay for a while
        with contextlib.suppress(subprocess.CalledProcessError):  # it is gone
            _run("ip", "link", "delete", f"hwrl-{senders}-{rank}")
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(ended) if one.error is not None]
    assert not errors, "\n".join(errors)
    assert all(one.value for one in ended[options.ranks :]), "other bytes arrived than were sent"
    return float(statistics.median(ended[0].value[_WARM_UP:]))


def _connect(own_end: str, rank: int, pid: int, *, gbit: float) -> None:
    """Lay a cable of ``gbit`` Gbit/s each way from ``own_end`` at the switch to the process."""
    _run("ip", "link", "add", own_end, "type", "veth", "peer", "name", _INTERFACE, "netns", str(pid))
    _run("ip", "link", "set", own_end, "master", _SWITCH, "up")
    _run("ip", "address", "add", f"10.77.0.{1 + rank}/24", "dev", _INTERFACE, host=pid)
    for interface in ("lo", _INTERFACE):
        _run("ip", "link", "set", interface, "up", host=pid)
    limit = ("root", "tbf", "rate", f"{gbit * 1e9:.0f}bit", "burst", "256kb", "latency", "100ms")
    _run("tc", "qdisc", "add", "dev", _INTERFACE, *limit, host=pid)
    _run("tc", "qdisc", "add", "dev", own_end, *limit)


def _await(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)
    return path.read_text()


def host(rank: int, home: Path, senders: int, options: argparse.Namespace) -> Any:
    """Be one host: a trainer rank, which returns the seconds of each version, or a receiver."""
    _leave_network()
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    torch.set_num_threads(1)
    (home / f"pid-{rank}").write_text(str(os.getpid()))
    _await(home / "connected")
    if rank == 0:
        served = serve_store("10.77.0.1")  # it lives as long as this function
        (home / "address").write_text(store_address(served))
    address = _await(home / "address")
    versions = options.rounds + _WARM_UP
    if rank >= options.ranks:
        return _receive(address, rank, versions, options)
    return _send(rank, address, senders, versions, options)


def _send(rank: int, address: str, senders: int, versions: int, options: argparse.Namespace) -> list[float]:
    store = connect_store(address)
    group = Comm().standalone_group(connect_store(address), rank=rank, size=options.ranks, name="trainer")
    sender = WeightSender(store, group=group, senders=senders)
    sender.wait_for_receivers(options.receivers)
    seconds = []
    for version in range(1, 1 + versions):
        source, begin = _source(group, version, options), time.perf_counter()
        sender.publish(version, source)
        seconds.append(time.perf_counter() - begin)
    group.barrier()
    if rank == 0:  # it serves the store
        await_keys(store, [f"left/{options.ranks + number}" for number in range(options.receivers)], timeout_s=60.0)
    return seconds


def _source(group: Group, version: int, options: argparse.Namespace) -> WeightSource:
    named = _weights(version, options.mib)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        shards = ((name, _shard(tensor, group) if options.sharded else tensor) for name, tensor in named)
        return gather_weights(shards, group, dtype=None)

    return WeightSource(lambda: iter([(name, tensor.to("meta")) for name, tensor in named]), read)


def _weights(version: int, mib: int) -> list[tuple[str, torch.Tensor]]:
    rows = max(1, (mib << 20) // _TENSOR_NBYTES)
    return [(f"w.{row}", torch.full((_TENSOR_NBYTES // 4,), float(version * 1000 + row))) for row in range(rows)]


def _shard(tensor: torch.Tensor, group: Group) -> WeightShard:
    return WeightShard(tensor.chunk(group.size)[group.rank], tuple(tensor.shape), 0, range(group.size))


def _receive(address: str, rank: int, versions: int, options: argparse.Namespace) -> bool:
    exact, into = True, {name: torch.zeros_like(tensor) for name, tensor in _weights(0, options.mib)}
    store = connect_store(address)
    with WeightReceiver(store, replica=f"r{rank}", into=into) as receiver:
        for _ in range(versions):
            received = receiver.receive(timeout_s=120.0)
            wanted = _weights(received.version, options.mib)
            exact &= all(torch.equal(received[name], tensor) for name, tensor in wanted)
    store.set(f"left/{rank}", "")
    return exact


if __name__ == "__main__":
    sys.exit(main())
