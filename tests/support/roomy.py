"""A CPU backend with a fixed amount of free memory, independent of the machine's load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import MemoryInfo
from hwrl_cpu import INFO, CpuBackend


class Roomy(CpuBackend):
    """Reports ``room`` bytes as never needed; with ``full`` an allocation fails all the same."""

    def __init__(self, room: int = 1 << 40, *, full: bool = False) -> None:
        super().__init__(INFO)
        self._room, self._full = room, full

    def memory_info(self) -> MemoryInfo:
        real = super().memory_info()
        return replace(real, free_nbytes=self._room, reserved_nbytes=real.peak_nbytes)

    @contextmanager
    def allocating(self, what: str) -> Iterator[None]:
        if self._full:
            raise DeviceMemoryError(f"{what} does not fit", why="it is full", fix="make room")
        yield
