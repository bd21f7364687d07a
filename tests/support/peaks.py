"""The exact peak of the memory that torch allocates on the CPU, by its profiler."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MARK = "measured peak"


class Peak:
    """The most bytes alive at one time since the block began; only of what was allocated inside it."""

    nbytes = 0


@contextmanager
def measured_peak() -> Iterator[Peak]:
    """Measure the block."""
    gc.collect()  # what dies inside the block would count as less
    found = Peak()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = 0
    for _, change in changes:
        now += change
        found.nbytes = max(found.nbytes, now)
