"""The trainer's end of a weight link: :class:`WeightSender`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch._C._distributed_c10d import Store

from hwrl.backend import Backend
from hwrl.comm import Comm
from hwrl.errors import CommTimeoutError, ConfigError, TransferFailedError
from hwrl.weights.board import Board, Metadata, Offer, checked_metadata
from hwrl.weights.device import DeviceSender
from hwrl.weights.host import HostSender
from hwrl.weights.layout import WeightLayout
from hwrl.weights.report import StageClock, TransferReport
from hwrl.weights.roster import Roster

Transport = Literal["device", "host"]


class WeightSender:
    """The trainer's end of the link ``name``; one at a time, and one thread.

    A new sender of the same name on the same store deposes the old one and begins a new epoch: receivers follow it,
    even if its versions are lower. ``transport`` "device" broadcasts to all receivers at once and waits for them;
    "host" copies into memory-mapped files on this host (``versions`` of them at most, under ``directory``, by default
    in memory) from which receivers pull later. ``slabs`` of ``slab_nbytes`` are under way at once. ``timeout_s``
    bounds each wait for receivers. A context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        backend: Backend | None = None,
        transport: Transport = "device",
        slab_nbytes: int = 16 << 20,
        slabs: int = 4,
        versions: int = 3,
        directory: Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        _check_options(transport=transport, slabs=slabs, versions=versions)
        self.transport = transport
        self._backend = Comm(backend).backend
        self._slab_nbytes, self._slabs, self._versions, self._directory = slab_nbytes, slabs, versions, directory
        self._timeout_s = timeout_s
        self._board = Board(store, name=name)
        self._roster = Roster(self._board)
        self._epoch = self._board.begin_epoch()
        self._layout: WeightLayout | None = None
        self._link: DeviceSender | HostSender | None = None
        self.version: int | None = None

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], metadata: Metadata | None = None
    ) -> TransferReport:
        """Send ``named_tensors`` as ``version``; return when every receiver has committed it or is excluded.

        All tensors are held until then and must not change meanwhile; with the host transport, only until they are
        copied. The first call plans the layout; later ones must bring the same names, dtypes and shapes in the same
        order (LayoutMismatchError). A version names its content: publishing the newest one again reaches only the
        receivers that joined since. Without a receiver the device transport sends nothing and reports 0 receivers.

        Raises TransferFailedError if another sender has taken over, if ``version`` is older than the newest, or if
        the transfer fails with no receiver to blame.
        """
        clock = StageClock()
        with clock("gather"), torch.no_grad():
            named = [(key, tensor.detach()) for key, tensor in named_tensors]
            self._check_turn(version)
            link = self._agree(named)
        base = Offer(
            number=0,
            epoch=self._epoch,
            version=version,
            transport=self.transport,
            layout=self._layout_hash,
            metadata=checked_metadata(metadata),
        )
        tensors = [tensor for _, tensor in named]
        excluded: dict[str, str] = {}
        if isinstance(link, DeviceSender):
            receivers, excluded = link.publish(base, tensors, clock)
        else:
            self._roster.refresh()  # before: who is quick has the version, and may have left, when it is written
            receivers = len(self._roster.members)
            link.publish(base, tensors, clock)
        self.version = version
        return TransferReport(version, self._payload_nbytes, clock.seconds, receivers, excluded)

    def joiners(self) -> tuple[str, ...]:
        """Return the replicas that have joined and lack the newest version; cheap.

        With the device transport they get it by the next ``publish``, of a new version or of the newest again. With
        the host transport they help themselves, and nobody is returned.
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

    def close(self) -> None:
        """Close the connections and delete the host versions. Receivers keep what they have."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _check_turn(self, version: int) -> None:
        if self._board.epoch() != self._epoch:
            raise TransferFailedError(
                f"this sender of {self._board.name!r} is deposed",
                why=f"it is sender {self._epoch}, and sender {self._board.epoch()} has taken over",
                fix="end this process; two trainers must not share a link's name",
            )
        if self.version is not None and version < self.version:
            raise TransferFailedError(
                f"version {version} cannot follow version {self.version}",
                why="receivers would take the older for the newer",
                fix="make a new WeightSender when training goes back to an older state",
            )

    def _agree(self, named: list[tuple[str, torch.Tensor]]) -> DeviceSender | HostSender:
        if self._link is not None and self._layout is not None:
            self._layout.check(named)
            return self._link
        self._layout = WeightLayout.plan(named, slab_nbytes=self._slab_nbytes)
        self._layout_hash, self._payload_nbytes = self._layout.hash, self._layout.payload_nbytes
        self._board.put_layout(self._layout)
        self._link = self._connect(self._layout)
        return self._link

    def _connect(self, layout: WeightLayout) -> DeviceSender | HostSender:
        if self.transport == "device":
            return DeviceSender(
                self._board,
                self._roster,
                layout,
                backend=self._backend,
                slabs=self._slabs,
                timeout_s=self._timeout_s,
            )
        return HostSender(
            self._board,
            layout,
            backend=self._backend,
            slabs=self._slabs,
            directory=self._directory,
            versions=self._versions,
            timeout_s=self._timeout_s,
        )


def _check_options(*, transport: str, slabs: int, versions: int) -> None:
    if transport not in ("device", "host"):
        raise ConfigError(
            f"there is no transport {transport!r}", why="known are 'device' and 'host'", fix="choose one of them"
        )
    if slabs < 1 or versions < 2:
        raise ConfigError(
            f"slabs={slabs}, versions={versions} cannot work",
            why="a transfer needs a slab, and a version to read while another is written",
            fix="use slabs=1 or more, versions=2 or more",
        )
