"""The trainer's end of a weight link: :class:`WeightSender`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError, CommTimeoutError, ConfigError, TransferFailedError, in_one_line
from hwrl.interfaces import Backend, Capability
from hwrl.weights.chapters import Chapters, on_meta
from hwrl.weights.control import ControlChannel, Limits, Metadata, Proposal, checked_metadata
from hwrl.weights.layout import ALIGNMENT_NBYTES, NamedTensor, WeightLayout
from hwrl.weights.membership import Membership
from hwrl.weights.report import StageClock, TransferReport
from hwrl.weights.shares import Shares, sender_ranks
from hwrl.weights.source import WeightSource, drain
from hwrl.weights.transaction import OutgoingVersion, SenderLink
from hwrl.weights.transport import SenderContext, Transport
from hwrl.weights.transports import TRANSPORTS


class WeightSender:
    """The trainer's end of the link ``name``. There is one at a time, used from one thread. A context manager.

    A new sender of the same name on the same store deposes the old one and begins a new epoch: receivers follow it,
    also to lower versions. ``transport`` names one of ``transports``. "device" broadcasts to all receivers and waits
    for them. "ipc" lets receivers on this host copy from this process's device memory, and waits for them; the backend
    must be able to open device memory of another process. "host" stores versions in memory-mapped files on this host,
    and receivers fetch them later: at most ``versions`` files (1 if only one version is ever sent), in memory or under
    ``directory``.

    A new receiver that does not come within ``patience_s``, while others do, gets a later version instead. It is
    excluded if it misses versions for ``timeout_s``. So receivers that join and never come do not delay a version for
    long.

    ``slabs`` slabs of ``slab_nbytes`` bytes (None: the device's best size) are under way at once. ``timeout_s`` limits
    each wait for receivers; they derive their own limits from it.

    With several ``senders`` other ranks send, too: each has a :class:`~hwrl.weights.CoSender`, and the weights are one
    of the ``sources`` of :class:`~hwrl.weights.SharedReads`. This sender is on rank 0 and coordinates. Only the device
    transport can do that.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        backend: Backend | None = None,
        transport: str = "device",
        senders: int = 1,
        slab_nbytes: int | None = None,
        slabs: int = 4,
        versions: int = 3,
        directory: Path | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 1.0,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        _check_transport(transport, transports)
        _check_senders(senders, transport, transports)
        _check_sizes(slab_nbytes=slab_nbytes, slabs=slabs, versions=versions)
        _check_timeout(timeout_s)
        self.transport, self._transport = transport, transports[transport]
        self._backend = backend_or_default(backend)
        self.senders, self._slabs = senders, slabs
        streams = self._backend.supports(Capability.STREAMS).usable
        nbytes, own_nbytes = slab_sizes(streams=streams, senders=senders, slab_nbytes=slab_nbytes)
        self._slab_sizes = nbytes, nbytes if self._transport.packs_large_tensors else own_nbytes
        self._versions, self._directory = versions, directory
        self._limits = Limits(float(timeout_s), patience_s=patience_s)
        self._channel = ControlChannel(store, name=name, payloads={transport: self._transport.payload})
        self._membership = Membership(self._channel)
        self._epoch = self._channel.begin_epoch()
        self._link: SenderLink | None = None
        self._content = self._contents = 0  # of the newest version; the newest number of all
        self.version: int | None = None

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def keeps_versions(self) -> bool:
        """Whether versions are stored, so that receivers fetch them without this sender."""
        return self._transport.keeps_versions

    def publish(
        self,
        version: int,
        weights: WeightSource | Iterable[NamedTensor],
        metadata: Metadata | None = None,
        *,
        to: Collection[str] | None = None,
        again: bool = False,
    ) -> TransferReport:
        """Send ``weights`` as ``version``; return when every receiver has committed it or is excluded.

        ``to`` names the receivers to send to; None means all that have joined. A name that has not joined is reported
        as excluded and not waited for (:meth:`wait_for_receivers` waits). The host transport cannot choose receivers.

        ``weights`` is a :class:`WeightSource` or any iterable of names and tensors, such as ``state_dict().items()``.
        It is read during the transfer, and again if the transfer is repeated. Only some slabs of tensors that are made
        while they are read are held at a time. An iterator can be read only once, and is always read to its end. If the
        transfer breaks after it was read, it fails (TransferFailedError), unless all tensors read so far are still
        held. Its tensors must own their memory. Reading may be collective: a read that has begun goes on to the end,
        also if this raises. Tensors must not change until this returns.

        The first call plans the layout, from the source's metadata; from an iterator, while it is read. Later calls
        must bring the same names, dtypes and shapes in the same order (LayoutMismatchError). A version names its
        content: publishing the newest one again reaches only receivers that have not got it (with the host transport,
        all). ``again`` says that the number is the caller's, a step for example: the tensors are sent to all receivers,
        also if they have this version, and the number may be any. Without receivers the device and ipc transports send
        nothing.

        Raises TransferFailedError if another sender has taken over, if ``version`` is older than the newest, or if the
        transfer fails repeatedly with no receiver to blame; no attempt begins later than four times ``timeout_s`` after
        the first. Whatever it raises, waiting receivers are told at once.
        """
        clock, shown = StageClock(), self._channel.shown
        content = self._content_of(version, again=again)
        try:
            with clock("gather"), torch.no_grad():
                self._check_turn(version, again=again)
                self._check_choice(to)
                source = self._source_of(weights)
                link = self._link_for(source)
            outcome = link.commit(OutgoingVersion(version, content, checked_metadata(metadata), source, to), clock)
        except BaseException as exc:
            self._abandon(version, exc, content=content, to=to, before=shown)
            raise
        finally:
            if isinstance(weights, Iterator):
                drain(weights)
        self.version, self._content = version, content
        nbytes = link.layout.payload_nbytes
        return TransferReport(version, nbytes, clock.seconds, outcome.receivers, outcome.excluded, clock.span_s())

    def new_receivers(self) -> tuple[str, ...]:
        """Return the receivers that have joined and committed no version of this sender; cheap.

        The next ``publish`` sends them a version, also if it is the newest one again. Always
        empty with the host transport, because receivers fetch stored versions without the sender.
        """
        self._membership.refresh()
        return () if self.keeps_versions else self._membership.new_receivers()

    def remove(self, *replicas: str, why: str = "the sender's owner removed it") -> None:
        """Remove receivers from the link: no publish waits for them from now on. Another thread may publish meanwhile.

        A transfer under way to one of them is ended, and repeated for the others. The removed receivers get
        ReceiverExcludedError with the reason ``why``; they may ``join`` again. Unknown names are ignored.
        """
        members = self._membership.remove(replicas, why)
        if self._link is not None:
            self._link.stop_sending_to(members)

    def receivers(self) -> tuple[str, ...]:
        """Return the names of the receivers that have joined, in join order; cheap."""
        self._membership.refresh()
        return self._membership.names()

    def wait_for_receivers(self, receivers: int | Collection[str], *, timeout_s: float = 60.0) -> None:
        """Block until so many receivers have joined, or all that are named.

        Raises CommTimeoutError with the names of those that have joined.
        """
        deadline = time.monotonic() + timeout_s
        while not self._have_joined(receivers):
            if time.monotonic() > deadline:
                wanted = receivers if isinstance(receivers, int) else f"{len(receivers)} ({', '.join(receivers)})"
                raise CommTimeoutError(
                    f"{len(self._membership.names())} of {wanted} receivers joined {self._channel.name!r}",
                    why=f"within {timeout_s:g} s only {sorted(self._membership.names())} came",
                    fix="start the others, with the same store and name",
                )
            time.sleep(0.005)

    def release(self) -> None:
        """Close the connections and free their device memory; the next ``publish`` opens both. Host versions stay."""
        if self._link is not None:
            self._link.release()
            self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and delete the host versions. Receivers keep the versions that they have."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _have_joined(self, receivers: int | Collection[str]) -> bool:
        self._membership.refresh()
        if isinstance(receivers, int):
            return len(self._membership.names()) >= receivers
        return not self._membership.absent(receivers)

    def _content_of(self, version: int, *, again: bool) -> int:
        """Return the number of a version's content: a new one, unless it is the newest version's."""
        if version == self.version and not again:
            return self._content
        self._contents += 1
        return self._contents

    def _abandon(
        self, version: int, exc: BaseException, *, content: int, to: Collection[str] | None, before: Proposal | None
    ) -> None:
        """Tell receivers that wait for ``version`` that it does not come, unless they belong to another sender.

        The receivers of a proposal know already, if one was shown since ``before``.
        """
        shown = self._channel.shown
        if shown is not before and self.keeps_versions:
            return  # it was for all
        told = () if shown is None or shown is before else shown.to
        with contextlib.suppress(CommError):  # the store is lost, too
            if self._channel.epoch() == self._epoch:
                self._membership.refresh()
                waiting = [member for member in self._membership.lacking(content, to) if member not in told]
                self._channel.abandon(self._epoch, version, in_one_line(exc), to=waiting)

    def _source_of(self, weights: WeightSource | Iterable[NamedTensor]) -> WeightSource:
        """Return ``weights`` as a source; an iterator is read as far as it can be held."""
        if not isinstance(weights, Iterator):
            return WeightSource.of(weights)
        if self._link is not None and self._link.is_planned:
            return WeightSource.of_known_layout(lambda: weights, one_shot=True)
        if self.keeps_versions:  # the size of a stored version must be known: the first one is held on the host
            return WeightSource.of([(name, tensor.to("cpu")) for name, tensor in weights])
        chapters = Chapters(weights, nbytes=self._slabs * self._slab_sizes[0])
        if chapters.ended:
            return WeightSource.of(chapters.first)
        return WeightSource(lambda: iter(on_meta(chapters.first)), lambda: iter(chapters.first), chapters=chapters)

    def _check_turn(self, version: int, *, again: bool) -> None:
        self._channel.check_epoch(self._epoch)
        if self.version is not None and version < self.version and not again:
            raise TransferFailedError(
                f"version {version} cannot follow version {self.version}",
                why="receivers would take the older for the newer",
                fix="publish it with again=True, or make a new WeightSender when training goes back to an older state",
            )

    def _check_choice(self, to: Collection[str] | None) -> None:
        if isinstance(to, str):
            raise ConfigError(f"to={to!r} names no receivers", why="it is one text", fix=f"use to=[{to!r}]")
        if to is not None and self.keeps_versions:
            raise ConfigError(
                f"the {self.transport} transport cannot send to {sorted(to)} only",
                why="it stores versions, and each receiver fetches them for itself",
                fix="leave `to` out, or use another transport",
            )

    def _check_ranks(self, source: WeightSource) -> None:
        ranks = 1 if source.shared is None else source.shared.reads.ranks
        if self.senders > ranks:
            raise ConfigError(
                f"senders={self.senders} cannot send these weights",
                why=f"{ranks} rank(s) read them together",
                fix="give publish() a source of SharedReads with a group of as many ranks or more",
            )

    def _link_for(self, source: WeightSource) -> SenderLink:
        """Return the link, with a layout for ``source``."""
        self._check_ranks(source)
        link = self._link or self._connect(source)
        if not link.is_planned:
            link.plan_again(source)
        return link

    def _connect(self, source: WeightSource) -> SenderLink:
        """Plan the layout, show it to the receivers, and open the transport."""
        slab_nbytes, own_nbytes = self._slab_sizes
        layout = WeightLayout.plan(source.metadata(), slab_nbytes=slab_nbytes, own_nbytes=own_nbytes)
        self._channel.put_layout(layout)
        context = SenderContext(
            store=self._channel.store,
            epoch=self._epoch,
            layout=layout,
            backend=self._backend,
            limits=self._limits,
            slabs=self._slabs,
            versions=self._versions,
            directory=self._directory,
            senders=self.senders,
        )
        self._link = SenderLink(
            self._channel,
            self._membership,
            context,
            name=self.transport,
            transport=self._transport,
            end=self._transport.sender(context),
            slab_sizes=self._slab_sizes,
            shares=self._shares(layout, source),
        )
        self._link.is_planned = source.chapters is None
        return self._link

    def _shares(self, layout: WeightLayout, source: WeightSource) -> Shares | None:
        if self.senders == 1 or source.shared is None:
            return None
        return Shares(layout, sender_ranks(self.senders, source.shared.reads.ranks))


def slab_sizes(*, streams: bool, senders: int = 1, slab_nbytes: int | None = None) -> tuple[int, int]:
    """Return the bytes of a slab, ``slab_nbytes`` if given, and of the smallest tensor that is sent as it lies.

    On a device with ``streams`` a collective needs 100 MiB to reach the wire's speed, and 20 µs of the host to begin;
    larger is no faster. Elsewhere the host does the work, and a slab should fit into its caches (docs/benchmarks.md).
    Several senders have slower wires, and a receiver has a slab of each under way: theirs are smaller, so its ring
    needs no more memory.
    """
    best_nbytes, own_nbytes = 16 << 20, 4 << 20
    if streams:
        best_nbytes, own_nbytes = max((256 << 20) // senders, 32 << 20), 16 << 20
        best_nbytes -= best_nbytes % ALIGNMENT_NBYTES
    chosen_nbytes = best_nbytes if slab_nbytes is None else slab_nbytes
    return chosen_nbytes, min(own_nbytes, chosen_nbytes // 4)  # slabs of tensors nearly as large would be half empty


def _check_timeout(timeout_s: float) -> None:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError(
            f"timeout_s={timeout_s} cannot work",
            why="receivers that hang are excluded after so many seconds",
            fix="use a positive number of seconds",
        )


def _check_senders(senders: int, transport: str, transports: Mapping[str, Transport]) -> None:
    """Raise ConfigError if so many ``senders`` cannot use ``transport``."""
    if senders < 1:
        raise ConfigError(f"senders={senders} cannot work", why="nobody would send", fix="use 1 or more")
    if senders > 1 and not transports[transport].several_senders:
        able = ", ".join(name for name, one in transports.items() if one.several_senders)
        raise ConfigError(
            f"senders={senders} is not possible with the {transport} transport",
            why=f"rank 0 alone has its memory there; several senders work with: {able}",
            fix="use senders=1, or another transport",
        )


def _check_transport(transport: str, transports: Mapping[str, Transport]) -> None:
    if transport not in transports:
        known = ", ".join(transports)
        raise ConfigError(f"there is no transport {transport!r}", why=f"known are {known}", fix="choose one of them")


def _check_sizes(*, slab_nbytes: int | None, slabs: int, versions: int) -> None:
    if slab_nbytes is not None and (slab_nbytes <= 0 or slab_nbytes % ALIGNMENT_NBYTES):
        raise ConfigError(
            f"slab_nbytes={slab_nbytes} cannot work",
            why=f"slabs are cut at multiples of {ALIGNMENT_NBYTES} bytes",
            fix=f"use a positive multiple of {ALIGNMENT_NBYTES}, or None for the device's best size",
        )
    if slabs < 1 or versions < 1:
        raise ConfigError(
            f"slabs={slabs}, versions={versions} cannot work",
            why="a transfer needs a slab, and memory for a version",
            fix="use slabs=1 or more, versions=2 or more, or versions=1 for one that is never replaced",
        )
