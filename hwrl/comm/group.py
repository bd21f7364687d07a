"""Process groups on torch.distributed: :class:`Group`, and :class:`Pending` for one operation in progress.

Ranks always count inside the group. Streams behave as in torch: an operation runs after the earlier work on the
caller's current stream, and :meth:`Pending.wait` makes that stream wait for the operation. On a device without streams
``wait`` blocks. :meth:`Pending.complete` blocks on every device. Groups carry tensors only; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hwrl.comm.failures import missing_ranks, translated
from hwrl.comm.staged import PAIRWISE, collectives_of
from hwrl.comm.store import PrefixStore, await_keys, pause, store_failures
from hwrl.comm.tensors import ReduceOp, check_lengths, flat, movable, reduction
from hwrl.errors import CommAbortedError, CommError, UnsupportedError
from hwrl.interfaces import Backend, Capability

DECISION = "decision"
"""The key whose first value says for all ranks whether a group is made: its name in torch, or why it is not made."""
CALLED_OFF = "called off"
_MADE, _MISSING = "made", "missing"
_LOOK_S = 0.2  # how often rank 0 looks at that key while it waits for the others
_WAIT_S = 0.5  # how often a wait for the host's library looks for an abort


class Pending:
    """An operation of a group, done or in progress. Do not change its tensors before :meth:`wait` returns.

    ``work`` is torch's object for it; None for an empty tensor.
    """

    __slots__ = ("_group", "_operation", "_work")

    def __init__(self, group: Group, operation: str, work: Any) -> None:
        self._group, self._operation, self._work = group, operation, work

    def wait(self) -> None:
        """Make the caller's current stream wait for the operation; without streams, block until it is done.

        With streams the host continues at once, so only :meth:`complete` reports a dead peer. Raises the errors of a
        blocking operation.
        """
        if self._work is None:
            return
        try:
            self._group._wait(self._work, self._operation)
        except RuntimeError as exc:
            raise self._group._failure(exc, self._operation) from exc

    def complete(self) -> None:
        """Block the host until the operation is done on the device; the current stream waits for it, too.

        Raises CommTimeoutError if it is not done after the group's ``timeout_s``, counted from this call;
        PeerLostError as soon as the library reports a lost peer; CommAbortedError if the group ends meanwhile. After
        the first two errors the group is aborted if the backend supports it, because a device that waits for a dead
        peer runs nothing else.
        """
        if self._work is None:
            return
        if not self._group._has_streams:
            self.wait()
            return
        try:
            self._group._watch(self._work, self._operation)
        except RuntimeError as exc:
            error = self._group._failure(exc, self._operation)
            with contextlib.suppress(UnsupportedError, CommError):  # it frees the device from the failed operation
                self._group.abort(f"an operation failed: {error.what}")
            raise error from exc


class Group:
    """A set of processes, and the collectives among them.

    Operations raise CommTimeoutError if a peer does not come within ``timeout_s``, PeerLostError if a peer closes its
    connection, and CommAbortedError after :meth:`abort` or :meth:`close`. After a timeout or a lost peer the group is
    unusable: call :meth:`rebuild` with the survivors. Without ``async_op`` an operation also waits, as
    :meth:`Pending.wait` does. So on a device with streams it is only queued when the call returns;
    :meth:`Pending.complete` and :meth:`barrier` raise the errors. Until then the group keeps the tensors of the newest
    operation alive. :class:`~hwrl.comm.Comm` makes groups. A group is a context manager and closes itself on exit.

    It is over one of torch's process groups; if that is ``borrowed``, closing this one leaves it as it is. The ranks
    met in ``store``, where all keys of the group have a prefix of their own. ``watchers`` counts the threads that block
    in :meth:`Pending.complete`.
    """

    def __init__(
        self,
        backend: Backend,
        process_group: Any,
        *,
        name: str,
        store: Store,
        timeout_s: float = 600.0,
        borrowed: bool = False,
    ) -> None:
        self.backend, self.name, self.store, self.timeout_s = backend, name, store, timeout_s
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._process_group, self._borrowed = process_group, borrowed
        self._collectives = collectives_of(backend)
        self._await_work = self._collectives.await_work
        self._has_streams = backend.supports(Capability.STREAMS).usable
        self._end_reason: str | None = None
        self._failed = self._is_aborted = False
        self.watchers = 0
        self._newest_work: Any = None
        self._rebuilds = 0
        self._warm_ups = 0

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self._failed = self._failed or exc[0] is not None
        self.close()

    # -- collectives --------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, *, src: int, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with rank ``src``'s. Any dtype; contiguous."""
        raw = movable(tensor, "broadcast")
        return self._run("broadcast", lambda group: group.broadcast(raw, src), raw, async_op=async_op)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Fill ``output`` with every rank's ``input``, in rank order. Any dtype; contiguous; size × input's length."""
        check_lengths("all_gather", whole=output, part=input, size=self.size)
        out, mine = flat(movable(output, "all_gather")), flat(movable(input, "all_gather"))
        return self._run("all_gather", lambda group: group._allgather_base(out, mine), mine, async_op=async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Pending:
        """Reduce every rank's ``input`` and write this rank's part to ``output``. Contiguous; an arithmetic dtype."""
        check_lengths("reduce_scatter", whole=input, part=output, size=self.size)
        options = dist.ReduceScatterOptions()
        options.reduceOp = reduction(output, "reduce_scatter", op)
        call = lambda group: group._reduce_scatter_base(output, input, options)  # noqa: E731 - one of a family
        return self._run("reduce_scatter", call, output, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with the reduction over all ranks. Contiguous; an arithmetic dtype."""
        torch_op = reduction(tensor, "all_reduce", op)
        return self._run("all_reduce", lambda group: group.allreduce(tensor, torch_op), tensor, async_op=async_op)

    def send(self, tensor: torch.Tensor, *, dst: int, async_op: bool = False) -> Pending:
        """Send ``tensor`` to rank ``dst``; that rank must call :meth:`recv`. Any dtype; contiguous."""
        raw = movable(tensor, "send")
        return self._run(f"send to rank {dst}", lambda group: group.send([raw], dst, 0), raw, async_op=async_op)

    def recv(self, tensor: torch.Tensor, *, src: int, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` with the tensor that rank ``src`` sends. Any dtype; contiguous."""
        raw = movable(tensor, "recv")
        return self._run(f"recv from rank {src}", lambda group: group.recv([raw], src, 0), raw, async_op=async_op)

    def barrier(self) -> None:
        """Block this thread until every rank calls it."""
        token = torch.ones(1, dtype=torch.int32, device=self.backend.device())
        self._run("barrier", lambda group: group.allreduce(token, dist.ReduceOp.SUM), token, async_op=True).complete()

    def warm_up(self, *, timeout_s: float = 60.0) -> None:
        """Open the connections now. The ranks meet over the store first, so CommTimeoutError names the missing ranks.

        Without it, a library may connect in the first operation of each kind. There a missing peer blocks the host.
        """
        self._warm_ups += 1
        self._meet(f"warm/{self._warm_ups}", range(self.size), f"cannot warm up {self.name!r}", timeout_s)
        self.barrier()
        self.broadcast(torch.zeros(1, device=self.backend.device()), src=0, async_op=True).complete()

    # -- the end ------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End every operation of this group that is blocked in another thread; each raises CommAbortedError.

        Peers see a lost connection or their own timeout. Raises UnsupportedError, and changes nothing, if the backend
        cannot abort.
        """
        process_group = self._process_group  # another thread may close the group
        if self._end_reason is not None or process_group is None:
            return
        self._end_reason = reason  # set first: the operations that end now report it
        try:
            self._collectives.abort_process_group(process_group)
        except UnsupportedError:
            self._end_reason = None
            raise
        except (RuntimeError, OSError) as exc:  # OSError: the process may open no more files
            raise translated(exc, f"abort group {self.name!r}", timeout_s=self.timeout_s) from exc
        self._is_aborted = True

    def close(self) -> None:
        """Release the group; later operations raise CommAbortedError. Aborts blocked operations where possible.

        On a device with streams it first blocks, up to ``timeout_s``, until queued operations have reached the peers;
        if a peer is known to be dead, call :meth:`abort` first. Closing the group of ``Comm.init_default``, or one
        made from it, destroys that group in torch, too; closing the result of ``Comm.default_group`` does not.
        """
        if self._process_group is None:
            return
        if not self._drain() and not self._borrowed:
            with contextlib.suppress(UnsupportedError):
                self.abort("the group was closed")
        self._end_reason = self._end_reason or "the group was closed"
        if not self._borrowed:
            with contextlib.suppress(ValueError):  # a backend may make it outside torch's registry
                dist.destroy_process_group(self._process_group)
        self._process_group = None

    def rebuild(self, *, survivors: Sequence[int], timeout_s: float = 60.0) -> Group:
        """Return a new group of the ranks ``survivors``, ranked in that order; close this group.

        Every survivor must call it with the same ``survivors``. Raises CommTimeoutError with the ranks that did not
        come (ranks of this group); call it again without them. Needs the store, and so the process that serves it.
        """
        if self.rank not in survivors:
            raise CommError(
                f"rank {self.rank} cannot rebuild {self.name!r}",
                why=f"it is not among the survivors {list(survivors)}",
                fix="only survivors call rebuild",
            )
        self._failed = True  # a peer is gone: queued operations never finish
        self.close()
        self._rebuilds += 1
        key = f"rebuild/{self._rebuilds}"
        self._meet(key, survivors, f"cannot rebuild {self.name!r}", timeout_s)
        return make_standalone_group(
            self.backend,
            PrefixStore(key, self.store),
            rank=list(survivors).index(self.rank),
            size=len(survivors),
            name=self.name,
            timeout_s=timeout_s,
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _run(self, operation: str, call: Callable[[Any], Any], tensor: torch.Tensor, *, async_op: bool) -> Pending:
        if self._end_reason is not None:
            raise self._failure(None, operation)
        try:
            work = call(self._process_group) if tensor.numel() else None
            if work is not None and not async_op:
                self._wait(work, operation)
            if self._has_streams and work is not None:
                self._newest_work = work
        except RuntimeError as exc:
            raise self._failure(exc, operation) from exc
        return Pending(self, operation, work)

    def _wait(self, work: Any, operation: str) -> None:
        """Make this thread's current stream wait for ``work``; without streams, block until it is done or aborted."""
        if not self._has_streams and not operation.startswith(PAIRWISE):  # whose work survives no timeout of its own
            self._wait_for_host(work, operation)
        self._await_work(work)

    def _wait_for_host(self, work: Any, operation: str) -> None:
        """Block until ``work`` has ended; raise CommAbortedError if it outlasts an abort.

        A host's library may hold an operation that began while its peer left, also after an abort.
        """
        while True:
            aborted, began_s = self._is_aborted, time.monotonic()  # what an abort ends has one more wait to end
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=_WAIT_S))
                return
            if (
                time.monotonic() - began_s < _WAIT_S / 2
            ):  # an error of the work, and no timeout: the last wait raises it
                return
            if aborted:
                raise self._failure(None, operation)

    def _watch(self, work: Any, operation: str) -> None:
        """Block until ``work`` is done on the device; raise the library's error, or RuntimeError at the deadline."""
        begin = time.monotonic()
        self.watchers += 1
        try:
            while not work.is_completed() and self._end_reason is None:
                passed_s = time.monotonic() - begin
                if passed_s >= self.timeout_s:
                    raise RuntimeError("timed out: the device still waits for a peer that died, hangs or is late")
                pause(passed_s)
            if self._end_reason is not None:
                raise self._failure(None, operation)
            work.wait()  # done, so it does not block; it orders the stream and raises the library's error
        finally:
            self.watchers -= 1
        if self._newest_work is work:
            self._newest_work = None

    def _drain(self) -> bool:
        """Wait up to ``timeout_s`` for queued operations; return whether all are done; False without streams."""
        if not self._has_streams or self._end_reason is not None or self._failed or self.watchers:
            return False
        try:
            if self._newest_work is not None:
                self._watch(self._newest_work, "close")
        except (RuntimeError, CommError):
            return False
        return True

    def _meet(self, key: str, ranks: Collection[int], operation: str, timeout_s: float) -> None:
        """Wait until ``ranks`` have written ``key`` to the store; raise CommTimeoutError with the missing ranks."""
        with store_failures():
            self.store.set(f"{key}/{self.rank}", "here")
        missing = await_keys(self.store, [f"{key}/{rank}" for rank in ranks], timeout_s=timeout_s)
        if missing:
            raise missing_ranks(
                operation, [int(name.rpartition("/")[2]) for name in missing], size=self.size, timeout_s=timeout_s
            )

    def _failure(self, exc: RuntimeError | None, operation: str) -> CommError:
        where = f"{operation} in group {self.name!r} on rank {self.rank} of {self.size}"
        self._failed = True
        if self._end_reason is not None or exc is None:
            return CommAbortedError(f"{where} was aborted", why=self._end_reason or "", fix="make a new group")
        return translated(exc, where, timeout_s=self.timeout_s)


def make_standalone_group(
    backend: Backend, store: Store, *, rank: int, size: int, name: str, timeout_s: float
) -> Group:
    """Implement :meth:`hwrl.comm.Comm.standalone_group`; :meth:`Group.rebuild` uses it, too."""
    collectives = collectives_of(backend)
    group_store = PrefixStore(f"group/{name}", store)
    torch_name = _check_in(group_store, rank=rank, size=size, name=name, timeout_s=timeout_s)
    try:
        process_group = collectives.create_process_group(
            group_store, rank=rank, size=size, name=torch_name, timeout=collectives.library_timeout(timeout_s)
        )
    except (RuntimeError, OSError) as exc:
        raise translated(exc, f"make group {name!r} as rank {rank} of {size}") from exc
    return Group(backend, process_group, name=name, store=group_store, timeout_s=timeout_s)


def _check_in(store: Store, *, rank: int, size: int, name: str, timeout_s: float) -> str:
    """Wait for all ranks; return the group's name in torch. It is unique: torch takes a name once per process."""
    with store_failures():
        if store.add(f"in/{rank}", 1) > 1:
            raise CommError(
                f"rank {rank} of group {name!r} is taken",
                why="a process has already come under this rank and name on this store",
                fix="give each rank to one process, and each new group a new name",
            )
        decision = _decide(store, rank=rank, size=size, name=name, timeout_s=timeout_s)
    if decision == CALLED_OFF:
        raise CommAbortedError(f"cannot make group {name!r}", why="a peer called it off", fix="make a new group")
    kind, _, detail = decision.partition(" ")
    if kind == _MADE and detail:
        return detail
    if kind == _MISSING and re.fullmatch(r"\d{1,9}(,\d{1,9})*", detail, re.ASCII):
        ranks = [int(peer) for peer in detail.split(",")]
        raise missing_ranks(f"cannot make group {name!r}", ranks, size=size, timeout_s=timeout_s)
    raise CommError(
        f"cannot make group {name!r}",
        why=f"the decision about it in the store is {decision[:80]!r}, which no rank writes",
        fix="make a new group; look for another program that uses the store",
    )


def _decide(store: Store, *, rank: int, size: int, name: str, timeout_s: float) -> str:
    """Wait for the decision, and return it. Rank 0 decides when all ranks have come; any rank does after a timeout."""
    arrivals = tuple(f"in/{peer}" for peer in range(size))
    awaited = arrivals if rank == 0 else (DECISION,)
    deadline = time.monotonic() + timeout_s
    while True:
        awaited = await_keys(store, awaited, timeout_s=min(_LOOK_S, deadline - time.monotonic()))
        if not awaited or time.monotonic() >= deadline or store.check([DECISION]):
            break
    if awaited and rank > 0:
        awaited = await_keys(store, arrivals, timeout_s=0.0) or arrivals[:1]  # rank 0 came, but decided nothing
    absent = ",".join(key.removeprefix("in/") for key in awaited)
    proposal = f"{_MISSING} {absent}" if awaited else f"{_MADE} {name}-{uuid.uuid4().hex}"
    return store.compare_set(DECISION, "", proposal).decode(errors="replace")  # the decision, if there is one already
