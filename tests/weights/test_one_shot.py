"""Weights that can be read only once: generators, whose tensors are known when they are made."""

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.errors import LayoutMismatchError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.testing.processes import Processes, run_processes
from hwrl.weights import StreamReceiver, WeightReceiver, WeightSender, WeightSource
from hwrl_cpu import INFO, CpuBackend
from tests.support.faulty import DyingBackend
from tests.support.speed import slow
from tests.support.weight_link import beside, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture

BUCKET_NBYTES = 4096
COUNT = 40


class Generated:
    """Tensors made one after the other, for a version; counts those that are alive at the same time."""

    def __init__(self, version: int) -> None:
        self.version, self.most_nbytes, self.ended = version, 0, False
        self._alive: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(COUNT):
            tensor = torch.full((100 + 37 * number,), float(self.version + number))
            self._alive = [pair for pair in self._alive if pair[0]() is not None]
            self._alive.append((weakref.ref(tensor), tensor.nbytes))
            self.most_nbytes = max(self.most_nbytes, sum(nbytes for _, nbytes in self._alive))
            yield f"t{number}", tensor
        self.ended = True


NBYTES = sum(4 * (100 + 37 * number) for number in range(COUNT))
HELD_NBYTES = 6 * BUCKET_NBYTES + 2 * 4 * (100 + 37 * COUNT)
"""The buckets under way, and two tensors."""


class Loader:
    """A loader that drops the tensors."""

    def begin(self) -> None: ...

    def load(self, tensors: Any) -> None: ...

    def finish(self) -> None: ...

    def cancel(self) -> None: ...


def _cpu() -> Backend:
    return CpuBackend(INFO)


def _is_whole(found: Any, version: int) -> bool:
    expected = dict(Generated(version).tensors())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _send_generated(rank: int, address: str, transport: str) -> Any:
    store = connect_store(address)
    if rank == 0:
        with WeightSender(
            store, backend=_cpu(), transport=transport, bucket_nbytes=BUCKET_NBYTES, timeout_s=600.0
        ) as sender:
            sender.wait_for_receivers(["r1", "r2", "r3"])
            reports, held = [], []
            for version in (1, 2, 3):
                generated = Generated(version)
                report = sender.publish(version, generated.tensors())
                reports.append((report.receivers, dict(report.excluded), report.nbytes))
                held.append(generated.most_nbytes)
                for peer in (1, 2, 3):
                    store.wait([f"got {version}/{peer}"])
            return reports, held
    into = {name: torch.zeros_like(tensor) for name, tensor in Generated(0).tensors()} if rank == 3 else None
    whole = []
    receiver: Any
    with (
        StreamReceiver(store, replica="r1", backend=_cpu())
        if rank == 1
        else WeightReceiver(store, replica=f"r{rank}", backend=_cpu(), into=into)
    ) as receiver:
        for version in (1, 2, 3):
            if rank == 1:
                with receiver.stream() as incoming:
                    whole.append(_is_whole(dict(incoming), version))
                received = incoming.received
            else:
                received = receiver.receive()
                whole.append(_is_whole(into or received, version))
            assert (received.version, received.nbytes, receiver.version) == (version, NBYTES, version)
            store.set(f"got {version}/{rank}", "")
    return whole


@pytest.mark.parametrize("transport", ["device", "ipc", "host"])
def test_a_later_generator_is_sent_while_it_is_read_and_little_of_it_is_held(transport: str) -> None:
    store = serve_store()
    (reports, held), *whole = run_processes(_send_generated, 4, store_address(store), transport)
    assert reports == [(3, {}, NBYTES)] * 3
    assert whole == [[True] * 3] * 3
    assert max(held[1:]) < HELD_NBYTES < NBYTES / 2, held  # the first version is held on the host


def _send_past_deaths(rank: int, address: str) -> Any:
    store = connect_store(address)
    if rank == 0:
        ends: list[Any] = []
        # A third of the timeout is for votes of the dead.
        with WeightSender(store, backend=_cpu(), bucket_nbytes=BUCKET_NBYTES, timeout_s=slow(4.0)) as sender:
            sender.wait_for_receivers(["r1", "r2", "r3"])
            for version in (1, 2, 3):
                generated, begin = Generated(version), time.monotonic()
                try:
                    ends.append(sender.publish(version, generated.tensors()).receivers)
                except TransferFailedError as exc:
                    ends.append(str(exc))
                    store.wait([f"told {version}"])  # a publish that follows at once would be taken as a repetition
                assert generated.ended and time.monotonic() - begin < slow(30.0)
        return ends
    backend = {2: DyingBackend(at=12), 3: DyingBackend(at=60, strikes=2)}.get(rank) or _cpu()
    found: list[Any] = []
    with StreamReceiver(store, replica=f"r{rank}", backend=backend) as receiver:
        while receiver.version != 3:
            try:
                with receiver.stream() as incoming:
                    named = dict(incoming)
                found.append((receiver.version, _is_whole(named, receiver.version or 0)))
            except TransferFailedError as exc:
                found.append((receiver.version, "gave up version" in exc.what and "only once" in exc.why))
                if rank == 1:
                    store.set("told 2", "")
    return found


def test_a_generator_whose_transfer_breaks_is_read_to_its_end_and_both_ends_are_told() -> None:
    store = serve_store()
    with Processes(_send_past_deaths, 4, store_address(store)) as processes:
        sent = processes.wait(0)
        assert sent.error is None, sent.error
        first, second, third = sent.value
        assert (first, third) == (2, 1), "the first version is held, so it can be repeated"
        assert "could not be sent again: its weights can be read only once" in second
        assert processes.wait(1).value == [(1, True), (None, True), (3, True)]
        for rank in (2, 3):
            assert "exit code -9" in str(processes.wait(rank).error)


def test_a_sender_keeps_nothing_of_a_generator(store: Store) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        tensor = torch.ones(10)
        made.append(weakref.ref(tensor))
        yield "w", tensor

    with sender_of(store) as sender:
        sender.publish(1, tensors())
        assert made[0]() is None


def test_a_source_that_says_once_is_read_lazily_from_the_first_version_on(store: Store) -> None:
    generated = Generated(1)
    metadata = [(name, tensor.to("meta")) for name, tensor in Generated(0).tensors()]
    source = WeightSource(lambda: iter(metadata), generated.tensors, one_shot=True)
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, receiver_of(store) as receiver:
        waiting = beside(receiver.receive)
        sender.wait_for_receivers(["r0"])
        sender.publish(1, source)
        assert _is_whole(waiting(), 1) and generated.most_nbytes < HELD_NBYTES


def test_a_name_that_comes_twice_is_refused_before_the_version_is_committed(store: Store) -> None:
    def twice() -> Iterator[tuple[str, torch.Tensor]]:
        yield from Generated(1).tensors()
        yield "t0", torch.zeros(3)

    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, receiver_of(store) as receiver:
        waiting = beside(receiver.receive)
        sender.wait_for_receivers(1)
        with pytest.raises(LayoutMismatchError, match="two tensors are called 't0'"):
            sender.publish(1, twice())
        with pytest.raises(TransferFailedError, match="gave up version 1"):
            waiting()
        again = beside(receiver.receive)
        sender.publish(1, Generated(1).tensors())
        assert _is_whole(again(), 1)
