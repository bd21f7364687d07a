"""The trainer's end of a weight link: :class:`WeightSender`."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError, CommTimeoutError, ConfigError, TransferFailedError, in_one_line
from hwrl.interfaces import Backend, Capability
from hwrl.weights.chapters import Chapters, on_meta
from hwrl.weights.control import ControlChannel
from hwrl.weights.layout import ALIGNMENT_NBYTES, WeightLayout, checked_pair
from hwrl.weights.membership import Membership
from hwrl.weights.messages import LONGEST_TIMEOUT_S, DecisionKind, Limits, Metadata, Proposal, checked_metadata
from hwrl.weights.report import StageClock, TransferReport
from hwrl.weights.shares import Shares, sender_ranks
from hwrl.weights.source import Weights, WeightSource, drain
from hwrl.weights.transaction import OutgoingVersion, SenderLink
from hwrl.weights.transport import SenderContext, Transport
from hwrl.weights.transports import TRANSPORTS

_NO_CONTENT = -1  # no receiver has it


class WeightSender:
    """The trainer's end of the link ``name``. Use it from one thread. A context manager.

    A link has one sender at a time. A new sender of the same name on the same store deposes the old one and begins a
    new epoch. Receivers follow the new sender even if its versions are lower.

    ``transport`` is a key of ``transports``. "device" broadcasts from the sender's device to the receivers' devices,
    by collectives; it alone of the built-in ones works across machines. "ipc" lets receivers on this host copy from
    this process's device memory; the backend must be able to open another process's device memory. With both, a
    transfer waits for all its receivers. "host" stores versions in memory-mapped files on this host, and each receiver
    copies them later. It has at most ``versions`` files. ``versions=1`` is enough if only one version is ever sent.
    Receivers can open a file only until this sender is closed, and only while this process lives.

    ``timeout_s`` limits each wait for receivers, and receivers derive their own limits from it. A new receiver is one
    that has committed no version of this sender. As soon as one receiver has committed a version, a publish waits
    only ``patience_s`` for new receivers, so one that joins and never comes does not delay versions for long. It gets
    a later version instead, and is excluded after it has missed versions for ``timeout_s``. The first publish waits up
    to ``timeout_s`` for everybody.

    ``slabs`` slabs of ``slab_nbytes`` bytes are under way at once; None chooses the best size for the device. Slabs
    of tensors that are contiguous in one storage are twice as large.

    With several ``senders`` other ranks send, too. Each of them has a :class:`~hwrl.weights.CoSender`, and the weights
    are one of the ``sources`` of :class:`~hwrl.weights.SharedReads`. This sender is on rank 0 and coordinates the
    others. Of the built-in transports only "device" supports this.
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
        self._versions = versions
        self._limits = Limits(float(timeout_s), patience_s=patience_s)
        self._channel = ControlChannel(store, name=name, payloads={transport: self._transport.payload})
        self._membership = Membership(self._channel)
        self._epoch = self._channel.begin_epoch()
        self._link: SenderLink | None = None
        self._content = self._contents = 0  # the content of the newest version; the number of contents so far
        self.version: int | None = None

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def keeps_versions(self) -> bool:
        """Whether the transport stores versions, so that receivers fetch them by themselves."""
        return self._transport.keeps_versions

    def publish(
        self,
        version: int,
        weights: Weights,
        metadata: Metadata | None = None,
        *,
        to: Collection[str] | None = None,
        again: bool = False,
    ) -> TransferReport:
        """Send ``weights`` as ``version``. Block until a round has committed it, or no receiver is left to wait for.

        ``to`` names the receivers (not with the host transport); None means all that have joined. Those not joined are
        ``excluded`` in the report. Excluded, postponed and late receivers do not get the version, and that is no error.

        ``weights`` is a module, a mapping of names to tensors, an iterable of such pairs, or a :class:`WeightSource`.
        What FSDP2 has divided among ranks needs a source that all ranks read together; WeightsError says how.
        It is read during the transfer, and again if the transfer is repeated. Tensors made during the read are held
        only for the slabs under way; the host transport holds all those of a first iterator. An iterator is always read
        to its end, and its tensors must own their memory. A transfer that breaks after some of them were dropped raises
        TransferFailedError. Reading may be a collective operation, so a read that has begun continues to its end even
        if this raises. Tensors must not change until this returns.

        The first call plans the layout from the source's metadata, or from an iterator while it is read. Later calls
        must bring the same names, dtypes and shapes in the same order (LayoutMismatchError).

        Publishing the newest version again sends it only to receivers without it (the host transport stores it for all
        again). With ``again`` the tensors count as new: they are sent to all receivers, and ``version`` may be any
        number, a step for example. Without receivers the device and ipc transports send nothing.

        Raises TransferFailedError if another sender has taken over, if ``version`` is no integer or older than the
        newest, or if three attempts fail with no receiver to exclude. No attempt begins later than four times
        ``timeout_s`` after the first. If this raises, waiting receivers are told at once.
        """
        clock, shown = StageClock(), self._channel.shown
        number, content = 0, _NO_CONTENT  # if version is no integer
        try:
            number, content = self._numbers_of(version, again=again)
            with clock("gather"), torch.no_grad():
                self._check_turn(number, again=again)
                self._check_choice(to)
                source = self._source_of(weights)
                link = self._link_for(source)
            outcome = link.commit(OutgoingVersion(number, content, checked_metadata(metadata), source, to), clock)
            self.version, self._content = number, content
        except BaseException as exc:
            if self._has_committed(content) or self._has_decided(shown):  # the error came after that
                self.version, self._content = number, content
            self._abandon(number, exc, content=content, to=to, before=shown)
            raise
        finally:
            if isinstance(weights, Iterator):
                drain(weights)
        changed = link.changed_share if self._has_committed(content) else None
        return TransferReport(number, link.layout.payload_nbytes, clock.seconds, *outcome, clock.span_s(), changed)

    def new_receivers(self) -> tuple[str, ...]:
        """Return the receivers that have joined and have committed no version of this sender. Cheap.

        The next ``publish`` sends them its version, even if it is the newest one again. Always empty with the host
        transport, because its receivers fetch stored versions by themselves.
        """
        self._membership.refresh()
        return () if self.keeps_versions else self._membership.new_receivers()

    def receivers(self) -> tuple[str, ...]:
        """Return the names of the receivers that have joined, in join order. Cheap."""
        self._membership.refresh()
        return self._membership.names()

    def wait_for_receivers(self, receivers: int | Collection[str], *, timeout_s: float = 60.0) -> None:
        """Block until ``receivers`` have joined: that many, or all those named.

        Raises CommTimeoutError with the names of those that have joined.
        """
        deadline = time.monotonic() + timeout_s
        while not self._have_joined(receivers):
            if time.monotonic() > deadline:
                wanted = receivers if isinstance(receivers, int) else f"{len(receivers)} ({', '.join(receivers)})"
                raise CommTimeoutError(
                    f"{len(self._membership.names())} of {wanted} receivers joined {self._channel.name!r}",
                    why=f"only {sorted(self._membership.names())} joined within {timeout_s:g} s",
                    fix="start the others, with the same store and name",
                )
            time.sleep(0.005)

    def release(self) -> None:
        """Close the connections and free their device memory; the next ``publish`` opens them again. Files stay."""
        if self._link is not None:
            self._link.release()
            self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and delete the host transport's files. Receivers keep what they have received.

        Not in a forked child.
        """
        self._channel.require_own_process()
        if self._link is not None:
            self._link.close()
        self._link = None

    def _have_joined(self, receivers: int | Collection[str]) -> bool:
        self._membership.refresh()
        if isinstance(receivers, int):
            return len(self._membership.names()) >= receivers
        return not self._membership.absent(receivers)

    def _has_committed(self, content: int) -> bool:
        committed = None if self._link is None else self._link.committed
        return committed is not None and committed.content == content

    def _has_decided(self, before: Proposal | None) -> bool:
        """Return whether the store has the decision to commit a proposal that was shown since ``before``."""
        shown, decision = self._channel.shown, None
        if shown is not None and shown is not before:
            with contextlib.suppress(CommError, TransferFailedError):
                decision = self._channel.decision(shown)
        return decision is not None and decision.kind is DecisionKind.COMMITTED

    def _numbers_of(self, version: int, *, again: bool) -> tuple[int, int]:
        """Return ``version`` as an int, and the number of its content: the newest content if this is published again.

        Members that have committed this content need no transfer. Raises TransferFailedError if it is no integer.
        """
        number = _checked_version(version)
        if number == self.version and not again:
            return number, self._content
        self._contents += 1
        return number, self._contents

    def _abandon(
        self, version: int, exc: BaseException, *, content: int, to: Collection[str] | None, before: Proposal | None
    ) -> None:
        """Tell the receivers that wait for ``version`` that it will not come; does nothing if this sender is deposed.

        If a proposal was shown since ``before``, its receivers know already.
        """
        shown = self._channel.shown
        if shown is not before and self.keeps_versions:
            return  # the proposal was for all receivers
        told = () if shown is None or shown is before else shown.to
        with contextlib.suppress(CommError):  # if the store is lost, too, nobody can be told
            if self._channel.epoch() == self._epoch:
                self._membership.refresh()
                waiting = [member for member in self._membership.lacking(content, to) if member not in told]
                self._channel.abandon(self._epoch, version, in_one_line(exc), to=waiting)

    def _source_of(self, weights: Weights) -> WeightSource:
        """Return ``weights`` as a source. A first iterator is read here, as far as its tensors can be held."""
        if not isinstance(weights, Iterator):
            return WeightSource.of(weights)
        if self._link is not None and self._link.is_planned:
            return WeightSource.of_known_layout(lambda: weights, one_shot=True)
        if self.keeps_versions:  # a file's size must be known, so the first version is held on the host
            return WeightSource.of([(name, tensor.to("cpu")) for name, tensor in map(checked_pair, weights)])
        chapters = Chapters(weights, nbytes=self._slabs * self._slab_sizes[0])
        if chapters.ended:
            return WeightSource.of(chapters.first)
        return WeightSource(lambda: iter(on_meta(chapters.first)), lambda: iter(chapters.first), chapters=chapters)

    def _check_turn(self, version: int, *, again: bool) -> None:
        self._channel.check_epoch(self._epoch)
        if self.version is not None and version < self.version and not again:
            raise TransferFailedError(
                f"version {version} cannot follow version {self.version}",
                why="receivers would take the older version for the newer one",
                fix="publish it with again=True, or make a new WeightSender when training goes back to an older state",
            )

    def _check_choice(self, to: Collection[str] | None) -> None:
        if isinstance(to, str):
            raise ConfigError(f"to={to!r} is not a list of receivers", why="it is one string", fix=f"use to=[{to!r}]")
        if to is not None and self.keeps_versions:
            raise ConfigError(
                f"the {self.transport} transport cannot send to {sorted(to)} only",
                why="it stores versions, and each receiver fetches them by itself",
                fix="leave `to` out, or use another transport",
            )

    def _check_ranks(self, source: WeightSource) -> None:
        ranks = 1 if source.shared is None else source.shared.reads.ranks
        if self.senders > ranks:
            raise ConfigError(
                f"senders={self.senders} cannot send these weights",
                why=f"only {ranks} rank(s) read them together",
                fix="give publish() a source of SharedReads whose group has at least that many ranks",
            )

    def _link_for(self, source: WeightSource) -> SenderLink:
        """Return the link after planning a layout for ``source``, if there is none for all tensors yet."""
        self._check_ranks(source)
        link = self._link or self._connect(source)
        if not link.is_planned:
            link.plan_again(source)
        return link

    def _connect(self, source: WeightSource) -> SenderLink:
        """Plan the layout, publish it in the store, and make the transport's end."""
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
    """Return the bytes of a slab, and the size from which a tensor gets slabs of its own and may be sent in place.

    The slab is ``slab_nbytes`` if given. On a device with ``streams`` a collective needs 100 MiB to reach the wire's
    speed, and takes the host 20 µs to begin; larger slabs are no faster. Elsewhere the host does the work, and a slab
    should fit into its caches (docs/benchmarks.md). With several senders each wire is slower and a receiver has a slab
    of each sender under way. Their slabs are smaller, so that the receiver's ring needs no more memory.
    """
    best_nbytes, own_nbytes = 16 << 20, 4 << 20
    if streams:
        best_nbytes, own_nbytes = max((256 << 20) // senders, 32 << 20), 16 << 20
        best_nbytes -= best_nbytes % ALIGNMENT_NBYTES
    chosen_nbytes = best_nbytes if slab_nbytes is None else slab_nbytes
    return chosen_nbytes, min(own_nbytes, chosen_nbytes // 4)  # packing larger tensors would leave slabs half empty


def _checked_version(version: Any) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(version, bool):
            return operator.index(version)
    raise TransferFailedError(f"version {version!r} cannot be sent", why="it is not an integer", fix="give an integer")


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s={timeout_s} cannot work",
            why="it is the time after which a receiver that does not answer is excluded",
            fix=f"use a positive number of seconds, at most {LONGEST_TIMEOUT_S:g}",
        )


def _check_senders(senders: int, transport: str, transports: Mapping[str, Transport]) -> None:
    """Raise ConfigError if this many ``senders`` cannot use ``transport``."""
    if senders < 1:
        raise ConfigError(f"senders={senders} cannot work", why="no rank would send", fix="use 1 or more")
    if senders > 1 and not transports[transport].several_senders:
        able = ", ".join(name for name, one in transports.items() if one.several_senders)
        raise ConfigError(
            f"senders={senders} is not possible with the {transport} transport",
            why=f"it does not divide a version among senders; several senders work with: {able}",
            fix="use senders=1, or another transport",
        )


def _check_transport(transport: str, transports: Mapping[str, Transport]) -> None:
    if transport not in transports:
        known = ", ".join(transports)
        raise ConfigError(
            f"there is no transport {transport!r} here",
            why=f"known are {known}",
            fix=f"choose one of these, or pass transports=hwrl.weights.with_transport({transport!r})",
        )


def _check_sizes(*, slab_nbytes: int | None, slabs: int, versions: int) -> None:
    if slab_nbytes is not None and (slab_nbytes <= 0 or slab_nbytes % ALIGNMENT_NBYTES):
        raise ConfigError(
            f"slab_nbytes={slab_nbytes} cannot work",
            why=f"a slab's size is a multiple of {ALIGNMENT_NBYTES} bytes",
            fix=f"use a positive multiple of {ALIGNMENT_NBYTES}, or None for the device's best size",
        )
    if slabs < 1 or versions < 1:
        raise ConfigError(
            f"slabs={slabs}, versions={versions} cannot work",
            why="a transfer needs at least one slab, and memory for at least one version",
            fix="use slabs=1 or more, and versions=2 or more (versions=1 if only one version is ever sent)",
        )
