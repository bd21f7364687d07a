"""The order of the tests: none that takes long starts last, when the other workers have nothing left to do."""

from __future__ import annotations

import pytest


def long_ones_first(items: list[pytest.Item], *, workers: int) -> list[pytest.Item]:
    """Return ``items`` with those marked ``long`` at the beginning of the shares of all workers but one.

    xdist's ``worksteal`` gives each worker an equal share of neighbours, and idle workers take from the ends of other
    shares. The last worker begins with short tests: few processes wait for each other, and time limits hold.
    """
    weights = {item: _seconds(item) for item in items}
    long = sorted((item for item in items if weights[item]), key=lambda item: -weights[item])
    short = [item for item in items if not weights[item]]
    starters = max(1, workers - 1)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) * (worker + 1)) // workers - (len(items) * worker) // workers
        first = long[worker::starters] if worker < starters else []
        room = max(0, share - len(first))
        ordered += [*first, *short[:room]]
        del short[:room]
    return ordered + short


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("long")
    return 0.0 if marker is None else float(marker.args[0])
