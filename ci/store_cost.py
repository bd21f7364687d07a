"""What the key of a store costs: medians of an operation and of a transfer, with and without the key, in turns.

``python ci/store_cost.py [ROUNDS]`` prints microseconds, also for a transfer of a small model by the host transport.
Machines are noisy: the two kinds take turns, and the median of all rounds counts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.weights import WeightReceiver, WeightSender
from hwrl_cpu import INFO, CpuBackend

_OPERATIONS, _TRANSFERS = 200, 20


def _serve(kind: str) -> tuple[Store, Store]:
    """Return a store and a client of it."""
    os.environ["HWRL_OPEN_STORE"] = "1" if kind == "open" else "0"
    served = serve_store()
    return served, connect_store(store_address(served))


def _median_us(work: list[float]) -> float:
    return statistics.median(work) * 1e6


def _operations(store: Store) -> list[float]:
    times = []
    for _ in range(_OPERATIONS):
        begin = time.perf_counter()
        store.check(["key"])
        times.append(time.perf_counter() - begin)
    return times


def _transfers(sender: WeightSender, receiver: WeightReceiver, first: int) -> list[float]:
    times = []
    for version in range(first, first + _TRANSFERS):
        begin = time.perf_counter()
        sender.publish(version, [("w", torch.zeros(1024))])
        receiver.receive(timeout_s=20.0)
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    """Measure, and print a line for operations and a line for transfers."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    operations: dict[str, list[float]] = {"open": [], "closed": []}
    transfers: dict[str, list[float]] = {"open": [], "closed": []}
    served = {kind: _serve(kind) for kind in operations}
    stores = {kind: client for kind, (_, client) in served.items()}
    links = {
        kind: (
            WeightSender(store, backend=CpuBackend(INFO), transport="host"),
            WeightReceiver(store, replica="r0", backend=CpuBackend(INFO)),
        )
        for kind, store in stores.items()
    }
    for number in range(rounds):
        for kind in stores if number % 2 else reversed(stores):
            operations[kind].extend(_operations(stores[kind]))
            transfers[kind].extend(_transfers(*links[kind], 1 + number * _TRANSFERS))
    for name, found in (("operation", operations), ("transfer", transfers)):
        closed, without = _median_us(found["closed"]), _median_us(found["open"])
        print(f"{name}: {closed:.0f} µs with the key, {without:.0f} without ({closed / without:.2f}x)")
    for sender, receiver in links.values():
        receiver.close()
        sender.close()


if __name__ == "__main__":
    main()
