"""The parts of all benchmarks: a plan of rounds, and the ways that take turns in it."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from hwrl.errors import HwrlError

if TYPE_CHECKING:
    import torch

_MeasuredT = TypeVar("_MeasuredT")


@dataclass(frozen=True)
class BenchPlan:
    """The ways to measure, and how often. The ``warm_up`` rounds come first, and no result has them."""

    ways: tuple[str, ...]
    rounds: int
    warm_up: int = 0

    def one_by_one(self, measure: Callable[[str], _MeasuredT]) -> dict[str, _MeasuredT]:
        """Call ``measure(way)`` once for each way; return the results, by way. The call measures all rounds of the way.

        For ways in separate processes: each needs the whole device, or memory without another way's traces.
        """
        return {way: measure(way) for way in self.ways}

    def take_turns(self, measure: Callable[[str, int], _MeasuredT]) -> dict[str, list[_MeasuredT]]:
        """Call ``measure(way, number)`` for each way in each round; return the results of the counted rounds, by way.

        Each round has all ways, so other work on the machine disturbs all of them alike.
        """
        rows: dict[str, list[_MeasuredT]] = {way: [] for way in self.ways}
        for number in range(self.warm_up + self.rounds):
            for way in self.ways:
                row = measure(way, number)
                if number >= self.warm_up:
                    rows[way].append(row)
        return rows


class Way:
    """One way to do the work of a benchmark: hwrl's, torch's, or another package's through its own code.

    Each benchmark adds abstract methods for its work, such as send and receive.
    """

    package: ClassVar[str] = ""
    """The other package's name, for the user; empty if the way needs hwrl and torch only."""
    module: ClassVar[str] = ""
    """The other package's top-level module."""

    @classmethod
    def why_not(cls) -> str | None:
        """Return the reason if this installation cannot run the way, else None. Imports nothing."""
        return None if not cls.module or _distributions(cls.module) else f"{cls.package} is not installed"

    @classmethod
    def version(cls) -> str:
        """Return the version of the other package. Its distribution may have another name for each device."""
        return importlib.metadata.version(_distributions(cls.module)[0])

    def close(self) -> None:
        """Release the way's resources. Most ways have none."""
        return


@dataclass(frozen=True)
class TransferResult:
    """The result of one transfer in one process: seconds, and a receiver's tensors.

    ``stages`` are this process's seconds by stage. ``transfer_s`` is the time of the bytes on the device, 0 if the way
    does not measure it. ``pause_s`` is how long a receiving engine could not step.
    """

    stages: Mapping[str, float] = field(default_factory=dict)
    transfer_s: float = 0.0
    pause_s: float = 0.0
    tensors: Mapping[str, torch.Tensor] | None = None


class TransferWay(Way, ABC):
    """One process's end of a way to move named tensors. Rank 0 sends; all other ranks receive.

    The constructor connects: it blocks until the other processes connect, and raises if the package cannot run here.
    In each round every process calls ``prepare``; then rank 0 calls ``send``, and the others ``receive``.
    """

    def prepare(self) -> None:
        """Get ready for the next transfer. The tensors have new values already. This time is not measured."""
        return

    @abstractmethod
    def send(self, version: int) -> TransferResult:
        """Send the tensors; may return before the device is done."""

    @abstractmethod
    def receive(self, version: int) -> TransferResult:
        """Receive the tensors; may return before the device is done."""


def _distributions(module: str) -> list[str]:
    return list(importlib.metadata.packages_distributions().get(module, []))


def one_line(exc: Exception) -> str:
    """Return the type and the first line of ``exc``, because some libraries put a stack below it.

    Of an HwrlError, return what failed and why.
    """
    if isinstance(exc, HwrlError):
        return f"{exc.what}: {exc.why}"
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
