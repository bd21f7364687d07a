"""Process groups: :class:`Group`, and :class:`Pending` for one operation in progress.

Ranks always count inside the group. Streams behave as in torch: an operation runs after the earlier work on the
caller's current stream, and :meth:`Pending.wait` makes that stream wait for the operation. On a device without streams
``wait`` blocks. :meth:`Pending.complete` blocks on every device. Groups carry tensors only; nothing is pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store as Store  # torch.distributed has it, too, but not for type checkers

    from hwrl.interfaces.backend import Backend

ReduceOp = Literal["sum", "max", "min"]


class Pending(ABC):
    """An operation of a group, done or in progress. Do not change its tensors before :meth:`wait` returns."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Make the caller's current stream wait for the operation; without streams, block until it is done.

        With streams the host continues at once, so only :meth:`complete` reports a dead peer. Raises the errors of a
        blocking operation.
        """

    @abstractmethod
    def complete(self) -> None:
        """Block the host until the operation is done on the device; the current stream waits for it, too.

        Raises CommTimeoutError if it is not done after the group's ``timeout_s``, counted from this call;
        PeerLostError as soon as the library reports a lost peer; CommAbortedError if the group ends meanwhile. After
        the first two errors the group is aborted if the backend supports it, because a device that waits for a dead
        peer runs nothing else.
        """


class Group(ABC):
    """A set of processes, and the collectives among them.

    Operations raise CommTimeoutError if a peer does not come within ``timeout_s``, PeerLostError if a peer closes its
    connection, and CommAbortedError after :meth:`abort` or :meth:`close`. After a timeout or a lost peer the group is
    unusable: call :meth:`rebuild` with the survivors. Without ``async_op`` an operation also waits, as
    :meth:`Pending.wait` does. So on a device with streams it is only queued when the call returns;
    :meth:`Pending.complete` and :meth:`barrier` raise the errors. Until then the group keeps the tensors of the newest
    operation alive. :class:`~hwrl.comm.Comm` makes groups. A group is a context manager and closes itself on exit.
    """

    backend: Backend
    name: str
    store: Store
    """The store where the ranks met. All keys of the group have a prefix of their own."""
    timeout_s: float
    rank: int
    size: int

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- collectives --------------------------------------------------------------------------------------------

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, src: int, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with rank ``src``'s. Any dtype; contiguous."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False) -> Pending:
        """Fill ``output`` with every rank's ``input``, in rank order. Any dtype; contiguous; size × input's length."""

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Pending:
        """Reduce every rank's ``input`` and write this rank's part to ``output``. Contiguous; an arithmetic dtype."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum", async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` on every rank with the reduction over all ranks. Contiguous; an arithmetic dtype."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, dst: int, async_op: bool = False) -> Pending:
        """Send ``tensor`` to rank ``dst``; that rank must call :meth:`recv`. Any dtype; contiguous."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, *, src: int, async_op: bool = False) -> Pending:
        """Overwrite ``tensor`` with the tensor that rank ``src`` sends. Any dtype; contiguous."""

    @abstractmethod
    def barrier(self) -> None:
        """Block this thread until every rank calls it."""

    @abstractmethod
    def warm_up(self, *, timeout_s: float = 60.0) -> None:
        """Open the connections now. The ranks meet over the store first, so CommTimeoutError names the missing ranks.

        Without it, a library may connect in the first operation of each kind. There a missing peer blocks the host.
        """

    # -- the end ------------------------------------------------------------------------------------------------

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every operation of this group that is blocked in another thread; each raises CommAbortedError.

        Peers see a lost connection or their own timeout. Raises UnsupportedError, and changes nothing, if the backend
        cannot abort.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the group; later operations raise CommAbortedError. Aborts blocked operations where possible.

        On a device with streams it first blocks, up to ``timeout_s``, until queued operations have reached the peers;
        if a peer is known to be dead, call :meth:`abort` first. Closing the group of ``Comm.init_default``, or one
        made from it, destroys that group in torch, too; closing the result of ``Comm.default_group`` does not.
        """

    @abstractmethod
    def rebuild(self, *, survivors: Sequence[int], timeout_s: float = 60.0) -> Group:
        """Return a new group of the ranks ``survivors``, ranked in that order; close this group.

        Every survivor must call it with the same ``survivors``. Raises CommTimeoutError with the ranks that did not
        come (ranks of this group); call it again without them. Needs the store, and so the process that serves it.
        """
