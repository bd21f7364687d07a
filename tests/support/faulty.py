"""Backends that fail on purpose, for tests of the weight link."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hwrl.comm import Store
from hwrl.interfaces import InlineEvent
from hwrl_cpu import INFO, CpuBackend


class FaultyBackend(CpuBackend):
    """The CPU with a faulty broadcast: number ``at`` (0-based) in each of the first ``strikes`` groups."""

    def __init__(self, *, at: int, strikes: int = 1) -> None:
        super().__init__(INFO)
        self.at, self.strikes = at, strikes

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> ProcessGroup:
        made = super().create_process_group(store, rank=rank, size=size, name=name, timeout=timeout)
        if self.strikes == 0:
            return made
        self.strikes -= 1
        return _FaultyGroup(self, made)  # type: ignore[return-value]  # it stands in for one

    def abort_process_group(self, group: ProcessGroup) -> None:
        super().abort_process_group(group.inner if isinstance(group, _FaultyGroup) else group)

    def fail(self, received: torch.Tensor) -> None:
        """Do the harm, once ``received`` has arrived."""
        raise NotImplementedError


class CorruptingBackend(FaultyBackend):
    """Flips one bit of the received tensor."""

    def fail(self, received: torch.Tensor) -> None:
        received.view(-1).view(torch.uint8)[-1] ^= 4


class DyingBackend(FaultyBackend):
    """Kills its process, as ``kill -9`` would."""

    def fail(self, received: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangingBackend(FaultyBackend):
    """Stops its process, as a debugger or a hung driver would."""

    def fail(self, received: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class LateBackend(CpuBackend):
    """The CPU with a late event: number ``at``, from 1, is reached when ``reach`` returns; ``and_later`` ones, too.

    Events with timing do not count. In a host sender of n buckets, events 1 to n are the buckets' arrivals on the host,
    and 2n + 1 to 3n those of the next version.
    """

    def __init__(self, *, at: int, reach: Callable[[], None], and_later: bool = False) -> None:
        super().__init__(INFO)
        self._at, self._reach, self._made, self._and_later = at, reach, 0, and_later

    def event(self, *, timing: bool = False) -> InlineEvent:
        self._made += not timing
        late = not timing and (self._made >= self._at if self._and_later else self._made == self._at)
        return _LateEvent(self._reach) if late else super().event(timing=timing)


class _LateEvent(InlineEvent):
    def __init__(self, reach: Callable[[], None]) -> None:
        super().__init__(lambda: None)
        self._reach = reach

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._reach()


class _FaultyGroup:
    def __init__(self, backend: FaultyBackend, inner: ProcessGroup) -> None:
        self.inner = inner
        self._backend, self._broadcasts = backend, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        work = self.inner.broadcast(tensor, root)
        self._broadcasts += 1
        return _FaultyWork(self._backend, work, tensor) if self._broadcasts == self._backend.at + 1 else work


class _FaultyWork:
    def __init__(self, backend: FaultyBackend, work: Any, tensor: torch.Tensor) -> None:
        self._backend, self._work, self._tensor, self._failed = backend, work, tensor, False

    def wait(self, *timeout: timedelta) -> None:
        self._work.wait(*timeout)
        if not self._failed:
            self._failed = True
            self._backend.fail(self._tensor)
