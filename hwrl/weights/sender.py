"""The trainer's end of a weight link: :class:`WeightSender`."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from hwrl.comm import Group, Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError, CommTimeoutError, ConfigError, TransferFailedError, in_one_line
from hwrl.interfaces import Backend, Capability
from hwrl.weights.control import ControlChannel
from hwrl.weights.layout import ALIGNMENT_NBYTES, WeightLayout, checked_pair
from hwrl.weights.membership import Membership
from hwrl.weights.messages import LONGEST_TIMEOUT_S, DecisionKind, Limits, Metadata, Proposal, checked_metadata
from hwrl.weights.ranks import Follower, on_rank_0, read_together
from hwrl.weights.report import StageClock, TransferReport
from hwrl.weights.source import Weights, WeightSource, drain, gather_weights
from hwrl.weights.transaction import OutgoingVersion, SenderLink, commit
from hwrl.weights.transport import SenderContext, Transport
from hwrl.weights.transports import TRANSPORTS

_NO_CONTENT = -1  # no receiver has it


class WeightSender:
    """The trainer's end of the link ``name``. Use it from one thread. A context manager.

    With ``group`` make it and call it alike on every rank of the group: what the ranks hold together, as FSDP2 divides
    it, is read by all of them. Rank 0 coordinates and talks to the receivers. Every rank gets its report, or an error.
    Without a group this process is alone.

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

    ``buckets`` buckets of ``bucket_nbytes`` bytes are under way at once; None chooses the best size for the device.
    Buckets of tensors that are contiguous in one storage are twice as large.

    With several ``senders`` as many ranks of the group send, each a share of every version, at equal distances in the
    group. Of the built-in transports only "device" supports this.
    """

    def __init__(
        self,
        store: Store,
        *,
        group: Group | None = None,
        name: str = "policy",
        backend: Backend | None = None,
        transport: str = "device",
        senders: int = 1,
        bucket_nbytes: int | None = None,
        buckets: int = 4,
        versions: int = 3,
        timeout_s: float = 60.0,
        patience_s: float = 1.0,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        _check_transport(transport, transports)
        _check_senders(senders, transport, transports, ranks=1 if group is None else group.size)
        _check_limits(bucket_nbytes=bucket_nbytes, buckets=buckets, versions=versions, timeout_s=timeout_s)
        self.transport, self._transport = transport, transports[transport]
        self._backend = backend_or_default(backend)
        self.group = None if group is None or group.size == 1 else group
        self.senders, self._buckets = senders, buckets
        self._link: SenderLink | None = None
        self.version: int | None = None
        self._follower: Follower | None = None
        if self.group is not None and self.group.rank:
            options: Any = {"backend": self._backend, "senders": senders, "buckets": buckets, "transports": transports}
            self._follower = Follower(store, self.group, name=name, **options)
            return
        streams = self._backend.supports(Capability.STREAMS).usable
        nbytes, own_nbytes = bucket_sizes(streams=streams, senders=senders, bucket_nbytes=bucket_nbytes)
        self._bucket_sizes = nbytes, nbytes if self._transport.packs_large_tensors else own_nbytes
        self._versions = versions
        self._limits = Limits(float(timeout_s), patience_s=patience_s)
        self._channel = ControlChannel(store, name=name, transports=transports)
        self._membership = Membership(self._channel)
        self._epoch = self._channel.begin_epoch()
        self._content = self._contents = 0  # the content of the newest version; the number of contents so far

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

        Call it on every rank of the group; rank 0's other arguments count. If it raises on rank 0, the others raise
        CommAbortedError with the reason, or an error of their own.

        ``to`` names the receivers (not with the host transport); None means all that have joined. Those not joined are
        ``excluded`` in the report. Excluded, postponed and late receivers do not get the version, and that is no error.

        ``weights`` is a module, a mapping of names to tensors, an iterable of such pairs, or a :class:`WeightSource`.
        DTensors of several ranks need the group; tensors that all ranks hold whole travel from rank 0. They are read
        during the transfer, and again if the transfer is repeated. Tensors made during the read are held only for the
        buckets under way. A first version's iterator is read before the transfer and held on the host; later ones are
        read once, and a transfer that breaks raises TransferFailedError. An iterator is always read to its end, its
        tensors must own their memory, and there must be one sender. Reading may be a collective operation, so a read
        that has begun continues to its end even if this raises. Tensors must not change until this returns.

        The first call plans the layout from the source's metadata, or from the iterator. Later calls must bring the
        same names, dtypes and shapes in the same order (LayoutMismatchError).

        Publishing the newest version again sends it only to receivers without it (the host transport stores it for all
        again). With ``again`` the tensors count as new: they are sent to all receivers, and ``version`` may be any
        number, a step for example. Without receivers the device and ipc transports send nothing.

        Raises TransferFailedError if another sender has taken over, if ``version`` is no integer or older than the
        newest, or if three attempts fail with no receiver to exclude. No attempt begins later than four times
        ``timeout_s`` after the first. If this raises, waiting receivers are told at once.
        """
        if self.group is not None and isinstance(weights, Iterator):
            weights = gather_weights(weights, self.group, dtype=None)
        try:
            report = on_rank_0(
                self.group,
                f"publish version {version}",
                lambda: asdict(self._publish(version, weights, metadata, to=to, again=again)),
                follow=functools.partial(self._follow, weights),
            )
        finally:
            if isinstance(weights, Iterator):
                drain(weights)
        self.version = report["version"]
        return TransferReport(**report | {"left_out": tuple(report["left_out"])})

    def _follow(self, weights: Weights, number: int) -> Exception | None:
        assert self._follower is not None, "only ranks above 0 follow"
        return self._follower.follow(self._as_source(weights), number)

    def _publish(
        self, version: int, weights: Weights, metadata: Metadata | None, *, to: Collection[str] | None, again: bool
    ) -> TransferReport:
        """Send a version from rank 0."""
        clock, shown = StageClock(), self._channel.shown
        number, content = 0, _NO_CONTENT  # if version is no integer
        try:
            number, content = self._numbers_of(version, again=again)
            with clock("gather"), torch.no_grad():
                self._check_call(number, to, again=again)
                source = self._source_of(weights)
                link = self._link = self._link or self._connect(source)
            outgoing = OutgoingVersion(number, content, checked_metadata(metadata), source, to)
            outcome = commit(link, outgoing, clock)
            self.version, self._content = number, content
        except BaseException as exc:
            if self._has_committed(content) or self._has_decided(shown):  # the error came after that
                self.version, self._content = number, content
            self._abandon(number, exc, content=content, to=to, before=shown)
            raise
        changed = link.changed_share if self._has_committed(content) else None
        return TransferReport(number, link.layout.payload_nbytes, clock.seconds, *outcome, clock.span_s(), changed)

    def new_receivers(self) -> tuple[str, ...]:
        """Return the receivers that have joined and have committed no version of this sender. Cheap.

        The next ``publish`` sends them its version, even if it is the newest one again. Always empty with the host
        transport, because its receivers fetch stored versions by themselves. Only rank 0 knows them; others return
        nothing, too: share rank 0's answer before all ranks publish, or none does.
        """
        if self._follower is not None or self.keeps_versions:
            return ()
        self._membership.refresh()
        return tuple(name for member, name in self._membership.members.items() if member not in self._membership.served)

    def receivers(self) -> tuple[str, ...]:
        """Return the names of the receivers that have joined, in join order. Cheap. Only rank 0 knows them."""
        if self._follower is not None:
            return ()
        self._membership.refresh()
        return self._membership.names()

    def wait_for_receivers(self, receivers: int | Collection[str], *, timeout_s: float = 60.0) -> None:
        """Block until ``receivers`` have joined: that many, or all those named. Call it on every rank.

        Raises CommTimeoutError with the names of those that have joined.
        """
        on_rank_0(self.group, "wait for receivers", lambda: self._wait_for(receivers, timeout_s))

    def _wait_for(self, receivers: int | Collection[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        named = [] if isinstance(receivers, int) else receivers
        least = receivers if isinstance(receivers, int) else 0
        while len(joined := self.receivers()) < least or not set(named) <= set(joined):
            if time.monotonic() > deadline:
                wanted = receivers if isinstance(receivers, int) else f"{len(receivers)} ({', '.join(receivers)})"
                raise CommTimeoutError(
                    f"{len(joined)} of {wanted} receivers joined {self._channel.name!r}",
                    why=f"only {sorted(joined)} joined within {timeout_s:g} s",
                    fix="start the others, with the same store and name",
                )
            time.sleep(0.005)

    def release(self) -> None:
        """Close the connections and free their device memory; the next ``publish`` opens them again. Files stay.

        Call it on every rank: it frees the memory of this one.
        """
        if self._follower is not None:
            self._follower.release()
        if self._link is not None:
            self._link.release()
            self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and delete the host transport's files. Receivers keep what they have received.

        Not in a forked child.
        """
        if self._follower is not None:
            self._follower.close()
            return
        self._channel.require_own_process()
        if self._link is not None:
            self._link.close()
        self._link = None

    def _has_committed(self, content: int) -> bool:
        committed = None if self._link is None else self._link.committed
        return committed is not None and committed[1] == content

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
        """Return ``weights`` as rank 0's source.

        A first iterator is read here and held on the host, to plan the layout.
        """
        source = self._as_source(weights)
        if self._link is not None or not isinstance(weights, Iterator):
            return source
        read = iter(source) if self.group is None else read_together(self.group, source)
        try:
            return WeightSource.of([(name, tensor.to("cpu")) for name, tensor in map(checked_pair, read)])
        finally:
            drain(read)  # before the other ranks hear of an error: they read to the end

    def _as_source(self, weights: Weights) -> WeightSource:
        if not isinstance(weights, Iterator):
            return WeightSource.of(weights, group=self.group)
        if self.senders > 1:
            raise ConfigError(
                "several senders cannot share an iterator",
                why=f"senders={self.senders}, and each tensor of an iterator exists once",
                fix="publish a module, a mapping or a WeightSource, or use senders=1",
            )
        return WeightSource.of_known_layout(lambda: weights, one_shot=True)

    def _check_call(self, version: int, to: Collection[str] | None, *, again: bool) -> None:
        if self.version is not None and version < self.version and not again:
            raise TransferFailedError(
                f"version {version} cannot follow version {self.version}",
                why="receivers would take the older version for the newer one",
                fix="publish it with again=True, or make a new WeightSender when training goes back to an older state",
            )
        if isinstance(to, str):
            raise ConfigError(f"to={to!r} is not a list of receivers", why="it is one string", fix=f"use to=[{to!r}]")
        if to is not None and self.keeps_versions:
            raise ConfigError(
                f"the {self.transport} transport cannot send to {sorted(to)} only",
                why="it stores versions, and each receiver fetches them by itself",
                fix="leave `to` out, or use another transport",
            )

    def _connect(self, source: WeightSource) -> SenderLink:
        """Plan the layout, publish it in the store, and make the transport's end."""
        bucket_nbytes, own_nbytes = self._bucket_sizes
        layout = WeightLayout.plan(source.metadata(), bucket_nbytes=bucket_nbytes, own_nbytes=own_nbytes)
        self._channel.put_layout(layout)
        context = SenderContext(
            store=self._channel.store,
            epoch=self._epoch,
            layout=layout,
            backend=self._backend,
            limits=self._limits,
            buckets=self._buckets,
            versions=self._versions,
            senders=self.senders,
        )
        return SenderLink(
            self._channel, self._membership, context, name=self.transport, transport=self._transport, group=self.group
        )


def bucket_sizes(*, streams: bool, senders: int = 1, bucket_nbytes: int | None = None) -> tuple[int, int]:
    """Return the bytes of a bucket, and the size from which a tensor gets buckets of its own and may be sent in place.

    The bucket is ``bucket_nbytes`` if given. On a device with ``streams`` a collective needs 100 MiB to reach the
    wire's speed, and takes the host 20 µs to begin; larger buckets are no faster. Elsewhere the host does the work, and
    a bucket should fit into its caches (docs/benchmarks.md). With several senders each wire is slower and a receiver
    has a bucket of each sender under way. Their buckets are smaller, so that the receiver's ring needs no more memory.
    """
    best_nbytes, own_nbytes = 16 << 20, 4 << 20
    if streams:
        best_nbytes, own_nbytes = max((256 << 20) // senders, 32 << 20), 16 << 20
        best_nbytes -= best_nbytes % ALIGNMENT_NBYTES
    chosen_nbytes = best_nbytes if bucket_nbytes is None else bucket_nbytes
    return chosen_nbytes, min(own_nbytes, chosen_nbytes // 4)  # packing larger tensors would leave buckets half empty


def _checked_version(version: Any) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(version, bool):
            return operator.index(version)
    raise TransferFailedError(f"version {version!r} cannot be sent", why="it is not an integer", fix="give an integer")


def _check_limits(*, bucket_nbytes: int | None, buckets: int, versions: int, timeout_s: float) -> None:
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s={timeout_s} cannot work",
            why="it is the time after which a receiver that does not answer is excluded",
            fix=f"use a positive number of seconds, at most {LONGEST_TIMEOUT_S:g}",
        )
    if bucket_nbytes is not None and (bucket_nbytes <= 0 or bucket_nbytes % ALIGNMENT_NBYTES):
        raise ConfigError(
            f"bucket_nbytes={bucket_nbytes} cannot work",
            why=f"a bucket's size is a multiple of {ALIGNMENT_NBYTES} bytes",
            fix=f"use a positive multiple of {ALIGNMENT_NBYTES}, or None for the device's best size",
        )
    if buckets < 1 or versions < 1:
        raise ConfigError(
            f"buckets={buckets}, versions={versions} cannot work",
            why="a transfer needs at least one bucket, and memory for at least one version",
            fix="use buckets=1 or more, and versions=2 or more (versions=1 if only one version is ever sent)",
        )


def _check_senders(senders: int, transport: str, transports: Mapping[str, Transport], *, ranks: int) -> None:
    """Raise ConfigError if this many ``senders`` cannot use ``transport``, or the group has fewer ``ranks``."""
    if senders < 1:
        raise ConfigError(f"senders={senders} cannot work", why="no rank would send", fix="use 1 or more")
    if senders > 1 and not transports[transport].several_senders:
        able = ", ".join(name for name, one in transports.items() if one.several_senders)
        raise ConfigError(
            f"senders={senders} is not possible with the {transport} transport",
            why=f"it does not divide a version among senders; several senders work with: {able}",
            fix="use senders=1, or another transport",
        )
    if senders > ranks:
        raise ConfigError(
            f"senders={senders} cannot send",
            why=f"the sender's group has {ranks} rank(s)",
            fix="make the sender on every rank with a group of at least that many ranks: group=…",
        )


def _check_transport(transport: str, transports: Mapping[str, Transport]) -> None:
    if transport not in transports:
        known = ", ".join(transports)
        raise ConfigError(
            f"there is no transport {transport!r} here",
            why=f"known are {known}",
            fix=f"choose one of these, or pass transports=hwrl.weights.with_transport({transport!r})",
        )
