"""Thousands of weight versions over three receivers that are killed in turns: ``make soak VERSIONS=2000``.

Each receiver checks every tensor of every version. A receiver is killed at a random moment of a transfer, and another
process takes its place. Memory and open files must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in the stubs

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.discovery import get_backend
from hwrl.errors import CommTimeoutError, ReceiverExcludedError, TransferFailedError
from hwrl.testing.processes import Processes
from hwrl.weights import Received, WeightReceiver, WeightSender

REPLICAS = ("r0", "r1", "r2")
"""The first one lives through the whole soak; the others are killed in turns."""
LIMIT = 0.01
"""The most by which memory may grow, from the second fifth of the versions to the last."""
_LIFE_S = 86400.0
_ACK_S = 600.0
_KILL_WITHIN_S = 0.02
_RECORDED = 200
"""Torch keeps the last 2,000 collectives of a process for post-mortems, about 1.2 MB. As many as here are kept before
the growth is measured, so that filling this buffer is not taken for a leak.
"""


@dataclass(frozen=True)
class Usage:
    """What a process holds: bytes of memory of its own, open files, threads.

    Pages of files do not count: the first error in a process reads 5 MB of torch's libraries, once, at any time.
    """

    nbytes: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        """Return what this process holds."""
        resident, of_files = map(int, Path("/proc/self/statm").read_text(encoding="utf-8").split()[1:3])
        files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        return cls((resident - of_files) * os.sysconf("SC_PAGE_SIZE"), files, threads)


@dataclass
class Soak:
    """The result: the versions and restarts, and what the sender and the first receiver held before each restart."""

    versions: int = 0
    restarts: int = 0
    seconds: float = 0.0
    sender: list[Usage] = field(default_factory=list)
    receiver: list[Usage] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def growth(self) -> dict[str, float]:
        """Return the growth from the second fifth of the versions to the last: memory as a share, others as numbers.

        Medians of a fifth: a connection of a dead receiver may live until the next transfer but one.
        """
        grown = {"store keys": _growth(self.keys)}
        for name, side in (("sender", self.sender), ("receiver", self.receiver)):
            nbytes = [usage.nbytes for usage in side]
            grown[f"{name} memory"] = _growth(nbytes) / nbytes[0]
            grown[f"{name} files"] = _growth([usage.files for usage in side])
            grown[f"{name} threads"] = _growth([usage.threads for usage in side])
        return grown

    def leaks(self) -> dict[str, float]:
        """Return what grew beyond its limit. The store keeps one key for each excluded receiver: why it is excluded."""
        limits = {"store keys": len(self.keys), "sender memory": LIMIT, "receiver memory": LIMIT}
        return {name: by for name, by in self.growth().items() if by > limits.get(name, 0)}


def _growth(values: Sequence[int]) -> float:
    """Return the median of the last fifth of ``values`` minus that of the second fifth."""
    fifth = max(1, len(values) // 5)
    return statistics.median(values[-fifth:]) - statistics.median(values[fifth : 2 * fifth] or values[:fifth])


def model_of(version: int, *, tensors: int = 24, numel: int = 10_000) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of ``version``: float32 tensors of ``numel`` equal numbers, each another one."""
    return ((f"layer.{index}", torch.full((numel,), float(version * tensors + index))) for index in range(tensors))


def is_whole(received: Received) -> bool:
    """Return whether all tensors are those of the version."""
    return all(torch.equal(received[name], tensor) for name, tensor in model_of(received.version))


def receive(rank: int, address: str, replica: str, life: int) -> None:
    """Receive versions without an end; note each whole one in the store, and what this process holds."""
    store = connect_store(address)
    with WeightReceiver(store, replica=replica, backend=get_backend()) as receiver:
        while True:
            try:
                received = receiver.receive(timeout_s=_LIFE_S)
            except ReceiverExcludedError:
                receiver.join()
                continue
            except (TransferFailedError, CommTimeoutError):
                continue
            note = {"version": received.version, "whole": is_whole(received), "life": life}
            store.set(replica, json.dumps({**note, "usage": vars(Usage.now())}))


def note_of(store: Store, replica: str) -> dict[str, Any]:
    """Return the newest note of ``replica``; its version is -1 before the first."""
    note: dict[str, Any] = json.loads(store.get(replica))
    return note


class Receivers:
    """The processes of the receivers. A context manager that kills them."""

    def __init__(self, store: TCPStore) -> None:
        self._store, self._address = store, store_address(store)
        self._lives: dict[str, int] = dict.fromkeys(REPLICAS, 0)
        self._processes: dict[str, ExitStack] = {}

    def __enter__(self) -> Receivers:
        for replica in REPLICAS:
            self._store.set(replica, json.dumps({"version": -1}))
            self._start(replica)
        return self

    def __exit__(self, *exc: object) -> None:
        for stack in self._processes.values():
            stack.close()

    def _start(self, replica: str) -> None:
        stack = self._processes[replica] = ExitStack()
        stack.enter_context(Processes(receive, 1, self._address, replica, self._lives[replica], timeout_s=_LIFE_S))

    def kill(self, replica: str) -> None:
        """Kill the process of ``replica``, and wait for its end."""
        self._processes[replica].close()

    def restart(self, replica: str) -> None:
        """Start another process of ``replica``."""
        self._lives[replica] += 1
        self._start(replica)

    def lacking(self, version: int) -> list[str]:
        """Return the receivers whose present process has not noted ``version``; raise for a torn one."""
        lacking = []
        for replica in REPLICAS:
            note = note_of(self._store, replica)
            if note["version"] != version or note["life"] != self._lives[replica]:
                lacking.append(replica)
            elif not note["whole"]:
                raise AssertionError(f"{replica} has a torn version {version}")
        return lacking


def soak(versions: int, *, restart_every: int, transport: str = "device", seed: int = 0) -> Soak:
    """Send ``versions`` versions, and check that all receivers get each before the next. Raises AssertionError."""
    store, result, chance = serve_store(), Soak(), random.Random(seed)
    began_s = time.monotonic()
    with (
        WeightSender(store, backend=get_backend(), transport=transport, timeout_s=100.0) as sender,
        Receivers(store) as receivers,
    ):
        sender.wait_for_receivers(REPLICAS)
        for version in range(1, versions + 1):
            if version % restart_every:
                sender.publish(version, list(model_of(version)))
            else:
                victim = REPLICAS[1 + result.restarts % 2]
                _publish_past_a_death(sender, receivers, version, victim, after_s=chance.uniform(0, _KILL_WITHIN_S))
                result.restarts += 1
            _await_all(sender, receivers, version)
            result.versions = version
            if (version + 1) % restart_every == 0:  # nobody is about to come or to go
                result.sender.append(Usage.now())
                result.receiver.append(Usage(**note_of(store, REPLICAS[0])["usage"]))
                result.keys.append(store.num_keys())
    result.seconds = time.monotonic() - began_s
    return result


def _publish_past_a_death(
    sender: WeightSender, receivers: Receivers, version: int, victim: str, *, after_s: float
) -> None:
    """Publish ``version``, kill a receiver ``after_s`` after the begin, and put another process in its place."""
    death = threading.Timer(after_s, receivers.kill, [victim])
    death.start()
    sender.publish(version, list(model_of(version)))
    death.join()
    receivers.restart(victim)


def _await_all(sender: WeightSender, receivers: Receivers, version: int) -> None:
    """Wait until all receivers have ``version``; send it again to those that joined later."""
    deadline_s = time.monotonic() + _ACK_S
    while lacking := receivers.lacking(version):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{lacking} have no version {version} after {_ACK_S:g} s")
        if sender.new_receivers():
            sender.publish(version, list(model_of(version)))
        time.sleep(0.001)


def main() -> int:
    """Soak; print what grew, and return 1 if something leaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="versions between two restarts")
    parser.add_argument("--transport", choices=("device", "host", "ipc"), default="device")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the deaths")
    args = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(_RECORDED)  # torch reads it at a process's first collective
    result = soak(args.versions, restart_every=args.every, transport=args.transport, seed=args.seed)
    print(f"{result.versions} versions, {result.restarts} restarts, {result.seconds:.0f} s; after the first fifth grew")
    for name, by in result.growth().items():
        print(f"  {name:16}" + (f"{by:+.2%}" if "memory" in name else f"{by:+g}"))
    leaks = result.leaks()
    print(f"it leaks: {', '.join(leaks)}" if leaks else "no leak, no torn version, no version missed")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
