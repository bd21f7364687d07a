"""A receiver with an error of its own is excluded with that error, and the others get the version."""

import threading
import time
from collections.abc import Sequence

import pytest

from hwrl.comm import Store
from hwrl.errors import ReceiverExcludedError
from hwrl.weights import NamedTensor, WeightReceiver
from tests.support.speed import slow
from tests.support.weight_link import beside, model_of, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture


class _Loader:
    """Loads tensors as an engine does; its device is full while ``is_full``."""

    def __init__(self) -> None:
        self.is_full, self.begun, self.loaded = True, 0, dict[str, float]()

    def begin(self) -> None:
        self.begun += 1

    def load(self, tensors: Sequence[NamedTensor]) -> None:
        if self.is_full:
            raise MemoryError("the device is full")
        self.loaded |= {name: float(tensor.flatten()[0]) for name, tensor in tensors}

    def finish(self) -> None: ...

    def cancel(self) -> None: ...


def test_it_is_excluded_with_its_error_and_the_others_get_the_version(store: Store) -> None:
    loader = _Loader()
    with (
        sender_of(store) as sender,
        receiver_of(store) as well,
        receiver_of(store, "r1", loader=loader) as failing,
    ):
        waiting, begun_s = [beside(well.receive), beside(failing.receive)], time.monotonic()
        report = sender.publish(1, model_of(1))
        assert time.monotonic() - begun_s < slow(8.0), "it waited for the receiver that had failed"
        assert report.receivers == 1 and waiting[0]().version == 1
        assert dict(report.excluded) == {"r1": "it failed: MemoryError: the device is full"}
        with pytest.raises(MemoryError, match="the device is full"):
            waiting[1]()
        with pytest.raises(ReceiverExcludedError, match="MemoryError: the device is full"):
            failing.receive()
        loader.is_full = False
        failing.join()
        waiting = [beside(well.receive), beside(failing.receive)]
        report = sender.publish(2, model_of(2))
        assert (report.receivers, [one().version for one in waiting]) == (2, [2, 2])
        assert loader.loaded == {"w": 2.0, "b": 2.0}


def test_one_that_joins_again_at_once_gets_the_next_version_and_delays_nobody(store: Store) -> None:
    loader, ended = _Loader(), threading.Event()
    with (
        sender_of(store) as sender,
        receiver_of(store) as well,
        receiver_of(store, "r1", loader=loader) as failing,
    ):
        waiting = beside(well.receive)
        retrying = threading.Thread(target=_receive_again_and_again, args=(failing, ended))
        retrying.start()
        try:
            report = sender.publish(1, model_of(1))
            assert (report.receivers, waiting().version, loader.begun) == (1, 1, 1)
            assert list(report.excluded) == ["r1"]
            loader.is_full, waiting = False, beside(well.receive)
            sender.wait_for_receivers(["r0", "r1"])
            report = sender.publish(2, model_of(2))
            assert (report.receivers, waiting().version) == (2, 2)
        finally:
            ended.set()
            retrying.join(200.0)
        assert loader.loaded == {"w": 2.0, "b": 2.0}


def _receive_again_and_again(receiver: WeightReceiver, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            receiver.receive(timeout_s=slow(0.5))
        except Exception:  # noqa: BLE001 - a replica that retries whatever happens
            receiver.join()
