"""A receiver whose versions are iterators: :class:`StreamReceiver` yields each tensor as soon as it has arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommAbortedError
from hwrl.interfaces import Backend
from hwrl.weights.layout import NamedTensor
from hwrl.weights.receiver import Received, WeightReceiver


class IncomingVersion:
    """A version that is being received: an iterator of names and tensors, and a context manager.

    The tensors belong to the caller and are never overwritten. They come in the order of the buckets. The decision
    comes last: iteration ends when the version is committed, and raises the errors of
    :meth:`~hwrl.weights.WeightReceiver.receive` if it is not. The tensors yielded so far are then not a version. If a
    transfer is repeated, for example because a receiver was lost, all tensors come again, and ``attempts`` grows.

    Leaving the context reads the rest and waits for the decision. Leaving it by an exception aborts the receive.
    """

    def __init__(self, receiver: WeightReceiver, loader: _NewestStream, *, backend: Backend, timeout_s: float) -> None:
        self.received: Received | None = None
        """The committed version, without its tensors; None before the decision, and if it was not taken to its end."""
        self.attempts = 0
        """The number of transfers of the version that have begun here."""
        self._receiver, self._timeout_s = receiver, timeout_s
        self._changed = threading.Condition()
        self._arrived: list[NamedTensor] = []  # in reverse
        self._closed = self._ended = self._has_dropped = self._cancelled = self._delivered = False
        self._error: BaseException | None = None
        self._index, self._stream, self._backend = backend.current_index(), backend.current_stream(), backend
        loader.incoming = self
        self._thread = threading.Thread(target=self._receive, name="hwrl-receive", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[NamedTensor]:
        return self

    def __next__(self) -> NamedTensor:
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._ended)
            if self._arrived:
                pair = self._arrived.pop()
                if not self._arrived:
                    self._changed.notify_all()
                return pair
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._has_dropped or self.received is None:
            self._lose()
            raise _cancelled("it was closed after the version was committed, and before its iteration had ended")
        self._delivered = True
        raise StopIteration

    def __enter__(self) -> IncomingVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self.close()
        else:
            for _ in self:
                pass

    def cancel(self) -> None:
        """Abort the receive without waiting for its end. Any thread may call this.

        Tensors that were not taken are dropped, also after the decision. The iterator then raises CommAbortedError.
        """
        with self._changed:
            self._closed, self._has_dropped = True, self._has_dropped or bool(self._arrived)
            self._arrived = []
            self._changed.notify_all()
        if self._thread.is_alive():
            self._cancelled = True
            self._receiver.cancel()

    def close(self) -> None:
        """Abort the receive, and wait for its end. A version whose iteration has not ended counts as not received.

        It can be received again: with the host transport at once, with the others when it is published again.
        """
        self.cancel()
        self._thread.join()
        if self._cancelled:
            self._cancelled = False
            self._receiver.forget_cancellation()
        if not self._delivered:
            self._lose()

    def _lose(self) -> None:
        if self.received is not None:
            self.received = None
            self._receiver.lose()

    def _receive(self) -> None:
        try:
            self._backend.set_device(self._index)
            with self._stream:  # the consumer's stream, so that it may use and free the tensors at once
                self.received = self._receiver.receive(timeout_s=self._timeout_s)
        except BaseException as exc:  # noqa: BLE001 - raised again by the consumer's thread
            self._error = exc
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # -- the receiving thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a transfer; drop the tensors of an earlier transfer that the consumer has not taken."""
        self.drop()
        self.attempts += 1

    def put(self, tensors: Sequence[NamedTensor]) -> None:
        """Put ``tensors`` when the earlier ones are taken. Raises CommAbortedError if the consumer has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._arrived)
            if self._closed:
                raise _cancelled("its consumer has ended")
            self._arrived = list(reversed(tensors))
            self._changed.notify_all()

    def drop(self) -> None:
        """Drop the tensors that the consumer has not taken."""
        with self._changed:
            self._arrived = []


class StreamReceiver:
    """A replica's end of the link ``name`` that yields each version's tensors, for an engine's own weight loaders.

    Options and use are those of :class:`~hwrl.weights.WeightReceiver`, with these differences. There is no ``into`` and
    no ``loader``, and :meth:`stream` replaces ``receive``. The receiver holds a ring of at most ``buckets`` buckets and
    ``ring_nbytes`` bytes (but one bucket at least), tensors that have arrived in part, and the tensors of one bucket
    until the caller takes them. The caller's old version is lost when tensors arrive, so :attr:`version` is None until
    the decision. While the caller does not iterate, the sender waits, up to its ``timeout_s``.
    """

    def __init__(self, store: Store, *, replica: str, backend: Backend | None = None, **options: Any) -> None:
        self._backend, self._loader = backend_or_default(backend), _NewestStream()
        self._incoming: IncomingVersion | None = None
        self._receiver = WeightReceiver(store, replica=replica, backend=self._backend, loader=self._loader, **options)
        self.join, self.poll, self.release = self._receiver.join, self._receiver.poll, self._receiver.release
        self.cancel = self._receiver.cancel

    @property
    def version(self) -> int | None:
        """The committed version; None before the first, while tensors arrive, and after a failed transfer."""
        return self._receiver.version

    def stream(self, *, timeout_s: float = 60.0) -> IncomingVersion:
        """Begin to receive the newest proposed version in a thread. Use the result in a ``with`` statement.

        ``timeout_s`` and the errors are those of :meth:`~hwrl.weights.WeightReceiver.receive`. Make every call with the
        same current device stream, and use the tensors on it. A new call closes the iterator of the call before.
        """
        self._close_stream()
        self._incoming = IncomingVersion(self._receiver, self._loader, backend=self._backend, timeout_s=timeout_s)
        return self._incoming

    def __enter__(self) -> StreamReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close an open iterator, leave the link and free the ring."""
        self._close_stream()
        self._receiver.close()

    def _close_stream(self) -> None:
        if self._incoming is not None:
            self._incoming.close()


class _NewestStream:
    """The receiver's loader. It passes each version to the newest :meth:`StreamReceiver.stream`."""

    incoming: IncomingVersion

    def begin(self) -> None:
        self.incoming.begin()

    def load(self, tensors: Sequence[NamedTensor]) -> None:
        self.incoming.put(tensors)

    def finish(self) -> None:
        """Do nothing: the receiving thread ends the iteration."""

    def cancel(self) -> None:
        self.incoming.drop()


def _cancelled(why: str) -> CommAbortedError:
    """Return the error of a stream that was cancelled."""
    return CommAbortedError("the receive was cancelled", why=why, fix="receive again")
