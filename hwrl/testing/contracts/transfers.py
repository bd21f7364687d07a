"""The contract of a transport when something fails: a failed transfer leaves nothing behind, and the next one works."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from hwrl.comm import serve_store
from hwrl.errors import HwrlError, UnsupportedError
from hwrl.interfaces import Backend
from hwrl.testing.contracts.weights import need_transport
from hwrl.testing.levels import Level
from hwrl.testing.limits import scaled
from hwrl.testing.subject import Subject
from hwrl.weights import (
    Checksums,
    Received,
    ReceiverContext,
    Transport,
    TransportReceiver,
    WeightReceiver,
    WeightSender,
    WeightSource,
    with_transport,
)

_TENSORS, _LENGTH, _BUCKET_NBYTES, _BUCKETS = 24, 1024, 8192, 2
_HELD = 16
"""How many of a version's tensors may be alive at once. A sender needs those of its buckets, 4, and some under way."""
_TIMEOUT_S = 10.0
_WAIT_S = 60.0
_CallResultT = TypeVar("_CallResultT")


class TransferContract:
    """A failed transfer changes nothing at a receiver, and later transfers work.

    Sender and receivers are threads of this process, each with its own end of the transport.
    """

    level: ClassVar[Level] = Level.ROLLOUT

    @pytest.fixture
    def link(self, backend: Backend, subject: Subject) -> Iterator[TransferLink]:
        """A link over the subject; closed at the end."""
        need_transport(backend, subject.name)
        with TransferLink(backend, subject.name) as link:
            yield link

    def test_versions_follow_each_other(self, link: TransferLink) -> None:
        """Two receivers commit each version. A third that joins later gets the newest."""
        first, second = link.join("first"), link.join("second")
        for version in (1, 2):
            link.exchange(version, [first, second])
        late = link.join("late")
        if link.sender.keeps_versions:
            assert late.receive(timeout_s=scaled(_WAIT_S)).version == 2
        link.exchange(3, [first, second, late])

    def test_a_failing_source_leaves_the_old_version(self, link: TransferLink) -> None:
        """The sender raises the source's error, the receiver keeps its version, and the next transfer works."""
        receiver = link.join("replica")
        before = link.exchange(1, [receiver])
        waiting = link.receive_or_fail(receiver)
        with pytest.raises(ZeroDivisionError):
            link.publish(2, fails_at=_TENSORS // 2)
        assert isinstance(waiting.result(scaled(_WAIT_S)), HwrlError), "a version whose source failed was committed"
        assert receiver.version == 1 and _holds(before, 1)
        link.exchange(3, [receiver])

    def test_a_damaged_bucket_never_commits(self, link: TransferLink) -> None:
        """The receiver computes other sums than the sender's: the transfer fails, and the receiver has no version."""
        whole = link.join("whole")
        link.exchange(1, [whole])
        whole.close()
        receiver = link.join("replica", damaged=True)
        waiting = link.receive_or_fail(receiver)
        with contextlib.suppress(HwrlError):  # publish raises if the transfer failed for all receivers
            link.publish(2)
        assert isinstance(waiting.result(scaled(_WAIT_S)), HwrlError), "a version with wrong sums was committed"
        assert receiver.version is None

    def test_a_receiver_that_leaves_stops_nobody(self, link: TransferLink) -> None:
        """The other receiver gets the next version."""
        stays, leaves = link.join("stays"), link.join("leaves")
        link.exchange(1, [stays, leaves])
        leaves.close()
        link.exchange(2, [stays])

    def test_nothing_is_left_of_old_versions(self, link: TransferLink) -> None:
        """The store has no more keys after ten versions than after four, and the sent tensors are free."""
        receiver = link.join("replica")
        counts = {}
        for version in range(1, 11):
            link.exchange(version, [receiver])
            counts[version] = link.store.num_keys()
        assert counts[10] <= counts[4], f"keys in the store by version: {counts}"
        gc.collect()
        assert link.living() == 0, f"the sender still holds {link.living()} of the sent tensors"

    def test_the_source_is_read_as_it_is_sent(self, link: TransferLink) -> None:
        """A sender holds the tensors of the buckets on their way, not those of a whole version."""
        receiver = link.join("replica")
        link.exchange(1, [receiver])
        assert link.most_living <= _HELD, f"{link.most_living} of {_TENSORS} tensors were held at once"


class TransferLink:
    """A sender over ``transport``, its receivers, and their threads. Counts the sent tensors that are alive."""

    def __init__(self, backend: Backend, transport: str) -> None:
        self.backend, self.transport, self.store = backend, transport, serve_store()
        self._transports = with_transport(transport)
        self._receivers: list[WeightReceiver] = []
        self._sent: list[weakref.ref[torch.Tensor]] = []
        self.most_living = 0
        self.sender = WeightSender(
            self.store,
            backend=backend,
            transport=transport,
            transports=self._transports,
            bucket_nbytes=_BUCKET_NBYTES,
            buckets=_BUCKETS,
            timeout_s=scaled(_TIMEOUT_S),
        )

    def __enter__(self) -> TransferLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sender.close()
        for receiver in self._receivers:
            receiver.close()

    def join(self, replica: str, *, damaged: bool = False) -> WeightReceiver:
        """Return a new receiver; the sums of a ``damaged`` one are wrong."""
        transports = dict(self._transports)
        if damaged:
            transports[self.transport] = with_damage(transports[self.transport])
        options: dict[str, Any] = {"backend": self.backend, "transports": transports, "buckets": _BUCKETS}
        self._receivers.append(WeightReceiver(self.store, replica=replica, **options))
        return self._receivers[-1]

    def exchange(self, version: int, receivers: list[WeightReceiver]) -> dict[str, torch.Tensor]:
        """Publish ``version``; every receiver must commit it. Return the first one's tensors."""
        waiting = [in_daemon_thread(_receive_or_leave, receiver) for receiver in receivers]
        report = self.publish(version)
        try:
            received = [one.result(scaled(_WAIT_S)) for one in waiting]
        except UnsupportedError as error:
            pytest.skip(f"{self.transport} does not connect a process with itself: {error.why}")
        assert report.excluded == {}
        assert [one.version for one in received] == [version] * len(receivers)
        assert all(_holds(one, version) for one in received), f"version {version} arrived with other values"
        return dict(received[0])

    def receive_or_fail(self, receiver: WeightReceiver) -> Future[object]:
        """Receive once, in a thread. The future's result is the version, or the error as a value."""

        def receive() -> object:
            try:
                return receiver.receive(timeout_s=scaled(_TIMEOUT_S)).version
            except HwrlError as error:
                return error

        return in_daemon_thread(receive)

    def publish(self, version: int, *, fails_at: int | None = None) -> Any:
        """Publish ``version``; its tensors are made as the sender reads them. Reading raises at ``fails_at``.

        The error is ZeroDivisionError.
        """
        return self.sender.publish(version, WeightSource(self._described, lambda: self._tensors(version, fails_at)))

    def living(self) -> int:
        """Return how many sent tensors are alive."""
        return sum(one() is not None for one in self._sent)

    def _described(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(_TENSORS):
            yield f"tensor.{number}", torch.empty(_LENGTH, device="meta")

    def _tensors(self, version: int, fails_at: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        self._sent.clear()
        for number in range(_TENSORS):
            if number == fails_at:
                raise ZeroDivisionError
            tensor = torch.full((_LENGTH,), float(version * 100 + number), device=self.backend.device())
            self._sent.append(weakref.ref(tensor))
            self.most_living = max(self.most_living, self.living())
            yield f"tensor.{number}", tensor


def in_daemon_thread(call: Callable[..., _CallResultT], *args: Any) -> Future[_CallResultT]:
    """Run ``call`` in a daemon thread, because a receive may never end; return its future."""
    result: Future[_CallResultT] = Future()

    def run() -> None:
        try:
            result.set_result(call(*args))
        except BaseException as exc:  # noqa: BLE001 - raised again in the waiting thread
            result.set_exception(exc)

    threading.Thread(target=run, name="hwrl-kit-receive", daemon=True).start()
    return result


def _receive_or_leave(receiver: WeightReceiver) -> Received:
    try:
        return receiver.receive(timeout_s=scaled(_WAIT_S))
    except UnsupportedError:
        receiver.close()  # the sender need not wait for it
        raise


def with_damage(transport: Transport) -> Transport:
    """Return ``transport`` with receivers whose own sums are wrong, as if a bucket had been damaged on its way."""

    def receiver(context: ReceiverContext) -> TransportReceiver:
        end = transport.receiver(context)
        real: Callable[..., Any] = end.receive

        def receive(receiving: Any, destination: Any, sums: Checksums, clock: Any) -> Any:
            add = sums.add

            def add_wrongly(index: int, memory: torch.Tensor) -> None:
                add(index, memory)
                sums.values += 1

            vars(sums)["add"] = add_wrongly
            return real(receiving, destination, sums, clock)

        vars(end)["receive"] = receive
        return end

    return replace(transport, receiver=receiver)


def _holds(received: Any, version: int) -> bool:
    return all(
        bool((received[f"tensor.{number}"] == float(version * 100 + number)).all()) for number in range(_TENSORS)
    )
