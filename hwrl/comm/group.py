"""Process groups and collectives, the same on every backend.

Ranks are always the group's own. Streams behave as torch's: an operation is ordered after what the caller's current
stream holds, and ``wait`` orders that stream after the operation; on a device whose work is done when a call returns,
``wait`` blocks. ``complete`` blocks on every device. Nothing is pickled: groups carry tensors only.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hwrl.comm.store import (
    await_keys,
    clone_store,
    connect_store,
    first_line,
    pause,
    serve_store,
    store_address,
    store_failures,
)
from hwrl.errors import CommAbortedError, CommError, CommTimeoutError, PeerLostError, UnsupportedError
from hwrl.interfaces.backend import Backend, Capability

__all__ = [
    "Comm",
    "Group",
    "Pending",
    "ReduceOp",
    "await_keys",
    "clone_store",
    "connect_store",
    "forget_group",
    "raw_bytes",
    "serve_store",
    "store_address",
    "store_failures",
]

ReduceOp = Literal["sum", "max", "min"]

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# What every collective library moves as it is, in every operation (one accepts no 8-bit unsigned and no 64-bit numbers
# in all_gather). Any other dtype is moved as its bytes, which is exact.
_CARRIED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8})
_REDUCED = frozenset({*_CARRIED, torch.float64, torch.int64, torch.uint8})


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous ``tensor`` as a 1-d uint8 view of its memory.

    >>> raw_bytes(torch.tensor(1.0)).tolist()
    [0, 0, 128, 63]
    """
    # as_strided, because a tensor of one element is contiguous with any stride, and view() then refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Comm:
    """Makes groups on one backend (the chosen one if None)."""

    def __init__(self, backend: Backend | None = None) -> None:
        if backend is None:
            from hwrl.discovery.registry import get_backend

            backend = get_backend()
        self.backend = backend

    def init_default(
        self,
        *,
        store: Store | None = None,
        rank: int | None = None,
        size: int | None = None,
        timeout_s: float = 600.0,
    ) -> Group:
        """Make torch's default group, on which DeviceMesh and FSDP2 work, and return it.

        Without ``store`` the rendezvous is torchrun's environment (MASTER_ADDR, RANK, …). Blocks until all came.
        """
        self.backend.require(Capability.COLLECTIVES, needed_for="make the default group")
        place: dict[str, Any] = {}
        if store is not None:
            place = {"store": store, "rank": _given(rank, "rank"), "world_size": _given(size, "size")}
        try:
            dist.init_process_group(
                self.backend.comm_library(), timeout=self.backend.library_timeout(timeout_s), **place
            )
        except (RuntimeError, ValueError) as exc:
            raise _translated(exc, "make the default group") from exc
        group = self.default_group()
        group.timeout_s = timeout_s
        return group

    def default_group(self) -> Group:
        """Return torch's default group; raises CommError if there is none."""
        if not dist.is_initialized():
            raise CommError("there is no default group", why="nobody made it", fix="call Comm.init_default() first")
        from torch.distributed import distributed_c10d as c10d

        return Group(self.backend, dist.group.WORLD, name="default", store=c10d._get_default_store())

    def new_group(self, ranks: Sequence[int], *, timeout_s: float = 600.0) -> Group | None:
        """Return a group of some ranks of the default group, or None on the others; every rank must call it."""
        whole = self.default_group()
        timeout = self.backend.library_timeout(timeout_s)
        made = dist.new_group(list(ranks), timeout=timeout, backend=self.backend.comm_library())
        if whole.rank not in ranks:
            return None
        name = f"ranks {','.join(str(rank) for rank in ranks)}"
        store = PrefixStore(made.group_name, whole.store)
        return Group(self.backend, made, name=name, store=store, timeout_s=timeout_s)

    def standalone_group(self, store: Store, *, rank: int, size: int, name: str, timeout_s: float = 60.0) -> Group:
        """Return a group of ``size`` processes that need share nothing but ``store``; no default group is touched.

        ``name`` must be new on this store. Blocks until all ranks came; raises CommTimeoutError that names those
        which did not within ``timeout_s``. The same ``timeout_s`` then bounds each operation of the group.
        """
        self.backend.require(Capability.COLLECTIVES, needed_for=f"make group {name!r}")
        mine = PrefixStore(f"group/{name}", store)
        called = _check_in(mine, rank=rank, size=size, name=name, timeout_s=timeout_s)
        try:
            made = self.backend.create_process_group(
                mine, rank=rank, size=size, name=called, timeout=self.backend.library_timeout(timeout_s)
            )
        except RuntimeError as exc:
            raise _translated(exc, f"make group {name!r} as rank {rank} of {size}") from exc
        return Group(self.backend, made, name=name, store=mine, timeout_s=timeout_s)


def forget_group(store: Store, *, name: str) -> None:
    """Delete what making the standalone group ``name``, or ``name``/…, left in ``store``; nobody may make it any more.

    The name cannot be told from a new one afterwards.
    """
    for key in store.list_keys():
        if key.startswith(f"group/{name}/"):
            store.delete_key(key)


def _check_in(store: Store, *, rank: int, size: int, name: str, timeout_s: float) -> str:
    """Wait for all ranks; return what the group is called in torch, where a name serves once in a process's life."""
    if store.add(f"in/{rank}", 1) > 1:
        raise CommError(
            f"rank {rank} of group {name!r} is taken",
            why="a process has already come under this rank and name on this store",
            fix="give each rank to one process, and each new group a new name",
        )
    if rank == 0:
        store.set("called", f"{name}-{uuid.uuid4().hex}")
    missing = await_keys(store, [f"in/{peer}" for peer in range(size)], timeout_s=timeout_s)
    if missing:
        raise _absent(f"cannot make group {name!r}", [int(key.removeprefix("in/")) for key in missing], size, timeout_s)
    return store.get("called").decode()


class Pending:
    """An operation under way, or done unless ``async_op`` was asked for. Keep its tensors unchanged until ``wait``."""

    __slots__ = ("_group", "_op", "_work")

    def __init__(self, group: Group, op: str, work: Any) -> None:
        self._group, self._op, self._work = group, op, work

    def wait(self) -> None:
        """Order the caller's current stream after the operation; without streams, block until it is done.

        With streams the host goes on, so a peer that died shows in :meth:`complete` only. Raises what a blocking call
        would raise.
        """
        if self._work is None:
            return
        try:
            self._group._await_work(self._work)
        except RuntimeError as exc:
            raise self._group._failure(exc, self._op) from exc

    def complete(self) -> None:
        """Block the host until the operation is done on the device; the current stream comes after it, too.

        Raises CommTimeoutError when it is not done ``timeout_s`` of the group after this call, PeerLostError as soon
        as the library tells, CommAbortedError when the group is ended meanwhile. In the first two cases the group
        has been aborted where the backend can do that: a device that waits for a dead peer runs nothing else.
        """
        if self._work is None:
            return
        if not self._group._has_streams:
            self.wait()
            return
        try:
            self._group._watch(self._work, self._op)
        except RuntimeError as exc:
            error = self._group._failure(exc, self._op)
            self._group._give_up(error)
            raise error from exc


class Group:
    """Some processes, and the collectives among them.

    Operations raise CommTimeoutError (a peer did not come within ``timeout_s``), PeerLostError (a peer's connection
    closed) or CommAbortedError (``abort`` or ``close`` was called). After the first two the group is of no more use:
    ``rebuild`` it with the survivors. On a device with streams an operation has only been queued when the call
    returns; there the errors come from :meth:`Pending.complete` and ``barrier``, and the group keeps the newest
    operation's tensors until one of them. Made by :class:`Comm`; a context manager that closes it.
    """

    def __init__(
        self,
        backend: Backend,
        process_group: Any,
        *,
        name: str,
        store: Store,
        timeout_s: float = 600.0,
    ) -> None:
        self.backend, self.name, self.store, self.timeout_s = backend, name, store, timeout_s
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._process_group = process_group
        self._await_work = backend.await_work
        self._has_streams = backend.supports(Capability.STREAMS).usable
        self._ended: str | None = None
        self._failed = False
        self._watchers = 0
        self._newest: Any = None
        self._rebuilds = 0
        self._warm_ups = 0

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    # -- collectives --------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, *, src: int, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` with rank ``src``'s. Any dtype; contiguous. Done on return unless ``async_op``."""
        raw = _carried(tensor, "broadcast")
        return self._run("broadcast", lambda group: group.broadcast(raw, src), raw, async_op=async_op)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Fill ``output`` with every rank's ``input``, in rank order. Any dtype; contiguous; size × input's length."""
        _check_lengths("all_gather", whole=output, part=input, size=self.size)
        out, mine = _flat(_carried(output, "all_gather")), _flat(_carried(input, "all_gather"))
        return self._run("all_gather", lambda group: group._allgather_base(out, mine), mine, async_op=async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Pending:
        """Reduce every rank's ``input`` and leave this rank's part in ``output``; contiguous."""
        _check_lengths("reduce_scatter", whole=input, part=output, size=self.size)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _reduction(output, "reduce_scatter", op)
        call = lambda group: group._reduce_scatter_base(output, input, options)  # noqa: E731 - one of a family
        return self._run("reduce_scatter", call, output, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with the reduction of all; contiguous; a dtype that libraries add up."""
        reduction = _reduction(tensor, "all_reduce", op)
        return self._run("all_reduce", lambda group: group.allreduce(tensor, reduction), tensor, async_op=async_op)

    def send(self, tensor: torch.Tensor, *, dst: int, async_op: bool = False) -> Pending:
        """Send ``tensor`` to rank ``dst``, which must ``recv`` it. Any dtype; contiguous."""
        raw = _carried(tensor, "send")
        return self._run(f"send to rank {dst}", lambda group: group.send([raw], dst, 0), raw, async_op=async_op)

    def recv(self, tensor: torch.Tensor, *, src: int, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` with what rank ``src`` sends. Any dtype; contiguous."""
        raw = _carried(tensor, "recv")
        return self._run(f"recv from rank {src}", lambda group: group.recv([raw], src, 0), raw, async_op=async_op)

    def barrier(self) -> None:
        """Block this thread until every rank came."""
        token = torch.ones(1, dtype=torch.int32, device=self.backend.device())
        self._run("barrier", lambda group: group.allreduce(token, dist.ReduceOp.SUM), token, async_op=True).complete()

    def warm_up(self, *, timeout_s: float = 60.0) -> None:
        """Open the connections now. Meets over the store first, so that CommTimeoutError names who did not come.

        A library may connect at the first operation of a kind, and block the host in it for a peer that is not there.
        """
        self._warm_ups += 1
        self._meet(f"warm/{self._warm_ups}", range(self.size), f"cannot warm up {self.name!r}", timeout_s)
        self.barrier()
        self.broadcast(torch.zeros(1, device=self.backend.device()), src=0, async_op=True).complete()

    # -- the end ------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End every operation of this group that is blocked in another thread; they raise CommAbortedError.

        Peers see a lost connection or their timeout. Raises UnsupportedError if the backend cannot do it; then
        nothing has changed.
        """
        if self._ended is not None:
            return
        self._ended = reason  # first, so that the ended operations know why
        try:
            self.backend.abort_process_group(self._process_group)
        except UnsupportedError:
            self._ended = None
            raise
        except RuntimeError as exc:
            raise _translated(exc, f"abort group {self.name!r}", timeout_s=self.timeout_s) from exc

    def close(self) -> None:
        """Give the group up; later operations raise CommAbortedError. Blocked ones are ended where that is possible.

        On a device with streams, first blocks up to ``timeout_s`` until what is queued has reached the peers; where a
        peer is known to be gone, ``abort`` before. Closing torch's default group, or a group made of it, destroys it
        in torch too.
        """
        if self._process_group is None:
            return
        if not self._is_quiet():
            with contextlib.suppress(UnsupportedError):
                self.abort("the group was closed")
        self._ended = self._ended or "the group was closed"
        with contextlib.suppress(ValueError):  # torch does not know it: the backend made it without torch's registry
            dist.destroy_process_group(self._process_group)
        self._process_group = None

    def rebuild(self, *, survivors: Sequence[int], timeout_s: float = 60.0) -> Group:
        """Return a new group of the ranks ``survivors`` of this one, ranked in that order; this one is closed.

        Every survivor must call it with the same ``survivors``. Raises CommTimeoutError that names the ranks of this
        group which did not come; call it again without them. Needs the store, so the process that serves it.
        """
        if self.rank not in survivors:
            raise CommError(
                f"rank {self.rank} cannot rebuild {self.name!r}",
                why=f"it is not among the survivors {list(survivors)}",
                fix="only survivors call rebuild",
            )
        self._failed = True  # a peer is gone: nothing that is still queued can be waited for
        self.close()
        self._rebuilds += 1
        key = f"rebuild/{self._rebuilds}"
        self._meet(key, survivors, f"cannot rebuild {self.name!r}", timeout_s)
        return Comm(self.backend).standalone_group(
            PrefixStore(key, self.store),
            rank=list(survivors).index(self.rank),
            size=len(survivors),
            name=self.name,
            timeout_s=timeout_s,
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _run(self, op: str, call: Callable[[Any], Any], moved: torch.Tensor, *, async_op: bool) -> Pending:
        if self._ended is not None:
            raise self._failure(None, op)
        try:
            work = call(self._process_group) if moved.numel() else None
            if work is not None and not async_op:
                self._await_work(work)
            if self._has_streams:
                self._newest = work
        except RuntimeError as exc:
            raise self._failure(exc, op) from exc
        return Pending(self, op, work)

    def _watch(self, work: Any, op: str) -> None:
        """Block until ``work`` is done on the device; raise the library's error, or ours at the deadline."""
        begin = time.monotonic()
        self._watchers += 1
        try:
            while not work.is_completed() and self._ended is None:
                passed_s = time.monotonic() - begin
                if passed_s >= self.timeout_s:
                    raise RuntimeError("timed out: the device still waits for a peer that died, hangs or is late")
                pause(passed_s)
            if self._ended is not None:
                raise self._failure(None, op)
            work.wait()  # does not block any more; orders the stream, and raises what the library found
        finally:
            self._watchers -= 1
        if self._newest is work:
            self._newest = None

    def _give_up(self, error: CommError) -> None:
        """Free the device from what failed; if that fails too, ``error`` says more."""
        with contextlib.suppress(UnsupportedError, CommError):
            self.abort(f"an operation failed: {error.what}")

    def _is_quiet(self) -> bool:
        """Return whether nothing is under way, waiting ``timeout_s`` for it; without streams nobody can know."""
        if not self._has_streams or self._ended is not None or self._failed or self._watchers:
            return False
        try:
            if self._newest is not None:
                self._watch(self._newest, "close")
        except (RuntimeError, CommError):
            return False
        return True

    def _meet(self, key: str, ranks: Collection[int], what: str, timeout_s: float) -> None:
        self.store.set(f"{key}/{self.rank}", "here")
        missing = await_keys(self.store, [f"{key}/{rank}" for rank in ranks], timeout_s=timeout_s)
        if missing:
            raise _absent(what, [int(name.rpartition("/")[2]) for name in missing], self.size, timeout_s)

    def _failure(self, exc: RuntimeError | None, op: str) -> CommError:
        where = f"{op} in group {self.name!r} on rank {self.rank} of {self.size}"
        self._failed = True
        if self._ended is not None or exc is None:
            return CommAbortedError(f"{where} was aborted", why=self._ended or "", fix="make a new group")
        return _translated(exc, where, timeout_s=self.timeout_s)


def _given(value: int | None, name: str) -> int:
    if value is None:
        raise CommError("a store needs rank and size", why=f"{name} is missing", fix=f"pass {name}= with store=")
    return value


def _carried(tensor: torch.Tensor, op: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise CommError(
            f"{op} needs a contiguous tensor", why=f"its strides are {tensor.stride()}", fix=".contiguous()"
        )
    if tensor.dtype not in _CARRIED:
        return raw_bytes(tensor).view(torch.int8)
    return tensor if tensor.dim() else _flat(tensor)  # libraries want dimensions; a view costs as much as all the rest


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _reduction(tensor: torch.Tensor, op: str, name: ReduceOp) -> Any:
    if tensor.dtype not in _REDUCED:
        raise UnsupportedError(
            f"cannot {op} {tensor.dtype}",
            why="collective libraries have no arithmetic for it, and adding its bytes would be wrong",
            fix="convert it first, for example to float32",
        )
    if name not in _REDUCE:
        raise CommError(f"cannot {op} with {name!r}", why=f"known are {', '.join(_REDUCE)}", fix="use one of them")
    return _REDUCE[name]


def _check_lengths(op: str, *, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise CommError(
            f"{op} cannot match its tensors",
            why=f"{whole.numel()} of {whole.dtype} is not {size} times {part.numel()} of {part.dtype}",
            fix="the longer tensor holds one part for each rank",
        )


def _absent(what: str, ranks: Sequence[int], size: int, timeout_s: float) -> CommTimeoutError:
    return CommTimeoutError(
        what,
        why=f"of {size} ranks, these did not come within {timeout_s:g} s: {', '.join(map(str, ranks))}",
        fix="look at those processes' logs",
    )


def _translated(exc: Exception, what: str, *, timeout_s: float | None = None) -> CommError:
    text = str(exc).lower()
    if "timed out" in text or "timeout" in text:
        limit = "" if timeout_s is None else f" within {timeout_s:g} s"
        return CommTimeoutError(
            f"{what} did not finish{limit}", why=first_line(exc), fix="look at the other ranks' logs"
        )
    if any(
        sign in text for sign in ("connection closed", "connection reset", "broken pipe", "remote process", "refused")
    ):
        return PeerLostError(f"{what} lost a peer", why=first_line(exc), fix="rebuild() the group with the survivors")
    return CommError(f"{what} failed", why=first_line(exc), fix="look at the cause below")
