"""The trainer's end of a weight link: :class:`WeightSender`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommTimeoutError, ConfigError, TransferFailedError
from hwrl.interfaces import Backend, Capability
from hwrl.weights.board import Board, Metadata, Offer, checked_metadata
from hwrl.weights.layout import ALIGNMENT_NBYTES, WeightLayout
from hwrl.weights.report import StageClock, TransferReport
from hwrl.weights.roster import Roster
from hwrl.weights.rounds import Named, Rounds
from hwrl.weights.transports.device import DeviceSender
from hwrl.weights.transports.host import HostSender
from hwrl.weights.transports.ipc import IpcSender

TransportName = Literal["device", "host", "ipc"]


class WeightSender:
    """The trainer's end of the link ``name``; one at a time, and one thread.

    A new sender of the same name on the same store deposes the old one and begins a new epoch: receivers follow it,
    even if its versions are lower. ``transport`` "device" broadcasts to all receivers at once and waits for them.
    "ipc" lets receivers on this host copy out of this process's device memory, and waits for them too; the backend
    must be able to open device memory of another process. "host" copies into memory-mapped files on this host
    (``versions`` of them at most, 1 if only one is ever sent; under ``directory``, by default in memory) from which
    receivers pull later.
    ``slabs`` of ``slab_nbytes`` (None: what suits the device) are under way at once. ``timeout_s`` bounds each wait
    for receivers, and the receivers derive their own limits from it. A context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        backend: Backend | None = None,
        transport: TransportName = "device",
        slab_nbytes: int | None = None,
        slabs: int = 4,
        versions: int = 3,
        directory: Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        _check_options(transport=transport, slab_nbytes=slab_nbytes, slabs=slabs, versions=versions)
        _check_timeout(timeout_s)
        self.transport = transport
        self._backend = backend_or_default(backend)
        usual, self._own_nbytes = _sizes(self._backend)
        self._slab_nbytes = usual if slab_nbytes is None else slab_nbytes
        self._slabs, self._versions, self._directory = slabs, versions, directory
        self._timeout_s = float(timeout_s)
        self._board = Board(store, name=name)
        self._roster = Roster(self._board)
        self._epoch = self._board.begin_epoch()
        self._link: Rounds | HostSender | None = None
        self.version: int | None = None

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def publish(self, version: int, named_tensors: Named, metadata: Metadata | None = None) -> TransferReport:
        """Send ``named_tensors`` as ``version``; return when every receiver has committed it or is excluded.

        A list, a dict's ``items()``, or any object with ``__iter__`` is read as the transfer goes on, and again if the
        transfer must be repeated; of tensors that are made while it is read only some slabs' worth is held at a time.
        An iterator can be read only once, so all that it yields is held. Reading may be collective: an iterator is
        always read to its end, and of an object every iteration that has begun is, also if this raises. Tensors must
        not change until this returns; with the host transport, only until they are copied. The first call plans the
        layout, from ``named_tensors.metadata()`` (names and meta tensors) where there is such a method; later ones must
        bring the same names, dtypes and shapes in the same order (LayoutMismatchError). A version names its content:
        publishing the newest one again reaches only the receivers that joined since (with the host transport, all).
        Without a receiver the device and ipc transports send nothing and report 0 receivers.

        Raises TransferFailedError if another sender has taken over, if ``version`` is older than the newest, or if
        the transfer fails with no receiver to blame, or again and again; no attempt begins later than four times
        ``timeout_s`` after the first. Whatever it raises, receivers that wait for the version are told at once.
        """
        clock = StageClock()
        with clock("gather"), torch.no_grad():
            named = list(named_tensors) if isinstance(named_tensors, Iterator) else named_tensors
            self._check_turn(version)
            link = self._link or self._connect(named)
        base = Offer(
            number=0,
            epoch=self._epoch,
            version=version,
            transport=self.transport,
            layout=self._layout.hash,
            timeout_s=self._timeout_s,
            metadata=checked_metadata(metadata),
        )
        receivers, excluded = link.publish(base, named, clock)
        self.version = version
        return TransferReport(version, self._layout.payload_nbytes, clock.seconds, receivers, excluded, clock.span_s())

    def joiners(self) -> tuple[str, ...]:
        """Return the replicas that have joined and lack the newest version; cheap.

        They get it by the next ``publish``, of a new version or of the newest again. With the host transport they help
        themselves, and nobody is returned.
        """
        self._roster.refresh()
        if self.transport == "host":
            return ()
        lacking = [member for member in self._roster.members if member not in self._roster.served]
        return tuple(self._roster.members[member] for member in lacking)

    def wait_for_receivers(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Block until ``count`` receivers have joined; raises CommTimeoutError that says who did."""
        deadline = time.monotonic() + timeout_s
        self._roster.refresh()
        while len(self._roster.members) < count:
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"{len(self._roster.members)} of {count} receivers joined {self._board.name!r}",
                    why=f"within {timeout_s:g} s only {sorted(self._roster.members.values())} came",
                    fix="start the others, with the same store and name",
                )
            time.sleep(0.005)
            self._roster.refresh()

    def release(self) -> None:
        """Free the device memory that transfers take, and close the connections; the next ``publish`` takes both anew.

        Host versions stay.
        """
        if self._link is not None:
            self._link.release()
            self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and delete the host versions. Receivers keep what they have."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _check_turn(self, version: int) -> None:
        self._board.check_epoch(self._epoch)
        if self.version is not None and version < self.version:
            raise TransferFailedError(
                f"version {version} cannot follow version {self.version}",
                why="receivers would take the older for the newer",
                fix="make a new WeightSender when training goes back to an older state",
            )

    def _connect(self, named: Named) -> Rounds | HostSender:
        """Plan the layout, tell the receivers, and return the transport's end."""
        described = named.metadata() if hasattr(named, "metadata") else named
        own_nbytes = self._slab_nbytes if self.transport == "ipc" else self._own_nbytes  # as few memories as possible
        self._layout = WeightLayout.plan(described, slab_nbytes=self._slab_nbytes, own_nbytes=own_nbytes)
        self._board.put_layout(self._layout)
        options: dict[str, Any] = {"backend": self._backend, "slabs": self._slabs, "timeout_s": self._timeout_s}
        parts = (self._board, self._roster, self._layout)
        if self.transport == "device":
            self._link = DeviceSender(*parts, **options)
        elif self.transport == "ipc":
            self._link = IpcSender(*parts, **options)
        else:
            self._link = HostSender(*parts, directory=self._directory, versions=self._versions, **options)
        return self._link


def _sizes(backend: Backend) -> tuple[int, int]:
    """Return the sizes from which on more is no faster: of a slab, and of a tensor that is sent as it lies.

    A collective on a device with streams needs 100 MiB to reach the wire's speed, and 20 µs of the host to begin;
    where the host does the work, a slab should fit into its caches (docs/benchmarks.md).
    """
    if backend.supports(Capability.STREAMS).usable:
        return 256 << 20, 16 << 20
    return 16 << 20, 4 << 20


def _check_timeout(timeout_s: float) -> None:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError(
            f"timeout_s={timeout_s} cannot work",
            why="receivers that hang are excluded after so many seconds",
            fix="use a positive number of seconds",
        )


def _check_options(*, transport: str, slab_nbytes: int | None, slabs: int, versions: int) -> None:
    if transport not in get_args(TransportName):
        known = ", ".join(get_args(TransportName))
        raise ConfigError(f"there is no transport {transport!r}", why=f"known are {known}", fix="choose one of them")
    if slab_nbytes is not None and (slab_nbytes <= 0 or slab_nbytes % ALIGNMENT_NBYTES):
        raise ConfigError(
            f"slab_nbytes={slab_nbytes} cannot work",
            why=f"slabs are cut at multiples of {ALIGNMENT_NBYTES} bytes",
            fix=f"use a positive multiple of {ALIGNMENT_NBYTES}, or None for what suits the device",
        )
    if slabs < 1 or versions < 1:
        raise ConfigError(
            f"slabs={slabs}, versions={versions} cannot work",
            why="a transfer needs a slab, and a place for a version",
            fix="use slabs=1 or more, versions=2 or more, or versions=1 for one that is never replaced",
        )
