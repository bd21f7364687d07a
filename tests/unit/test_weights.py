"""The rules of the weight link, with sender and receivers as threads of one process; the groups are real."""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Store

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.errors import (
    CommTimeoutError,
    ConfigError,
    LayoutMismatchError,
    PeerLostError,
    QuarantinedError,
    TransferFailedError,
    UnsupportedError,
)
from hwrl.weights import TransferReport, WeightReceiver, WeightSender
from hwrl.weights.board import Offer
from hwrl.weights.report import StageClock
from hwrl_cpu import INFO, CpuBackend
from tests.distributed.faulty import CorruptingBackend, LateBackend


@pytest.fixture
def store() -> Iterator[Store]:
    yield serve_store()


def _sender(store: Store, **options: Any) -> WeightSender:
    return WeightSender(store, **{"backend": CpuBackend(INFO), "timeout_s": 10.0, **options})


def _receiver(store: Store, replica: str = "r0") -> WeightReceiver:
    return WeightReceiver(store, replica=replica, backend=CpuBackend(INFO), timeout_s=10.0)


def _model(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((700,), float(value))), ("b", torch.tensor(float(value)))]


def _beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``work`` in a thread; the returned function waits for its result, or raises what it raised."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except Exception as exc:  # noqa: BLE001 - raised again in the waiting thread
            ended.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(20.0)
        assert ended, "the thread is still at work"
        if isinstance(ended[0], Exception):
            raise ended[0]
        return ended[0]

    return result


def _exchange(sender: WeightSender, receivers: list[WeightReceiver], version: int) -> TransferReport:
    """Publish ``version`` to ``receivers`` and check that each has it."""
    waiting = [_beside(functools.partial(receiver.receive, timeout_s=10.0)) for receiver in receivers]
    report = sender.publish(version, _model(version))
    for wait in waiting:
        received = wait()
        assert received.version == version and received["b"].item() == version
    return report


def test_poll_offers_each_version_once_and_never_blocks(store: Store) -> None:
    with _sender(store) as sender, _receiver(store) as receiver:
        assert receiver.poll() is None
        publishing = _beside(lambda: sender.publish(5, _model(5)))
        while receiver.poll() is None:
            pass
        assert receiver.poll() == 5
        received = receiver.receive()
        assert publishing().receivers == 1
        assert (receiver.poll(), receiver.version, received["w"][0].item()) == (None, 5, 5.0)


def test_without_receivers_a_version_is_published_to_nobody_and_joiners_are_told(store: Store) -> None:
    with _sender(store) as sender:
        assert sender.publish(1, _model(1)).receivers == 0
        assert sender.joiners() == ()
        with _receiver(store, "late") as receiver:
            assert sender.joiners() == ("late",)
            assert receiver.poll() is None
            assert _exchange(sender, [receiver], 1).receivers == 1
            assert sender.joiners() == ()


def test_the_newest_version_again_reaches_only_joiners(store: Store) -> None:
    with _sender(store) as sender, _receiver(store, "old") as old:
        _exchange(sender, [old], 1)
        with _receiver(store, "new") as new:
            assert _exchange(sender, [new], 1).receivers == 2
            assert old.poll() is None
            assert _exchange(sender, [old, new], 2).receivers == 2


def test_a_receiver_that_left_is_not_waited_for(store: Store) -> None:
    with _sender(store) as sender, _receiver(store, "stays") as stays:
        goes = _receiver(store, "goes")
        _exchange(sender, [stays, goes], 1)
        goes.close()
        report = _exchange(sender, [stays], 2)
        assert (report.receivers, dict(report.quarantined)) == (1, {})


def test_a_restarted_replica_takes_its_namesakes_place(store: Store) -> None:
    with _sender(store) as sender:
        dead = _receiver(store, "r0")
        _exchange(sender, [dead], 1)
        with _receiver(store, "r0") as restarted:
            report = _exchange(sender, [restarted], 2)
            assert (report.receivers, dict(report.quarantined)) == (1, {})
            with pytest.raises(QuarantinedError, match="another receiver joined as replica 'r0'"):
                dead.poll()


def test_a_receiver_that_restarts_while_the_sender_waits_is_served(store: Store) -> None:
    with _sender(store) as sender:
        dead = _receiver(store, "r0")
        publishing = _beside(lambda: sender.publish(1, _model(1)))
        while dead.poll() is None:
            pass
        with _receiver(store, "r0") as restarted:
            assert restarted.receive(timeout_s=10.0).version == 1
            assert publishing().receivers == 1


def test_a_receiver_that_does_not_come_is_named_and_may_join_again(store: Store) -> None:
    with (
        _sender(store, timeout_s=0.5) as sender,
        _receiver(store, "here") as here,
        _receiver(store, "absent") as absent,
    ):
        report = _exchange(sender, [here], 1)
        assert report.receivers == 1
        assert dict(report.quarantined) == {"absent": "it did not come to receive within 0.5 s"}
        with pytest.raises(QuarantinedError, match=r"did not come to receive[\s\S]*join\(\)"):
            absent.receive(timeout_s=1.0)
        absent.join()
        assert sender.joiners() == ("absent",)
        assert _exchange(sender, [here, absent], 2).receivers == 2


def test_a_new_sender_deposes_the_old_and_may_go_back(store: Store) -> None:
    with _sender(store) as first, _receiver(store) as receiver:
        _exchange(first, [receiver], 9)
        with pytest.raises(TransferFailedError, match="version 8 cannot follow version 9"):
            first.publish(8, _model(8))
        with _sender(store) as second:
            _exchange(second, [receiver], 3)
            assert receiver.version == 3
            with pytest.raises(TransferFailedError, match=r"deposed[\s\S]*sender 2 has taken over"):
                first.publish(10, _model(10))


def test_other_tensors_need_another_sender(store: Store) -> None:
    with _sender(store) as sender, _receiver(store) as receiver:
        _exchange(sender, [receiver], 1)
        with pytest.raises(LayoutMismatchError, match="'b' was planned as"):
            sender.publish(2, [("w", torch.zeros(700)), ("b", torch.zeros(2))])
        with _sender(store) as other:
            waiting = _beside(lambda: receiver.receive(timeout_s=10.0))
            other.publish(2, [("only", torch.ones(3))])
            assert list(waiting()) == ["only"]


def test_an_error_while_tensors_are_read_reaches_the_caller_and_spoils_nothing(store: Store) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(700)
        raise KeyError("the model is broken")

    with _sender(store) as sender, _receiver(store) as receiver:
        with pytest.raises(KeyError):
            sender.publish(1, broken())
        _exchange(sender, [receiver], 1)


def _into(store: Store, targets: dict[str, torch.Tensor]) -> WeightReceiver:
    return WeightReceiver(store, replica="r0", backend=CpuBackend(INFO), into=targets, timeout_s=10.0)


def test_a_version_is_received_into_the_receivers_own_tensors(store: Store) -> None:
    targets = {"b": torch.zeros(()), "w": torch.zeros(1400)[::2], "other": torch.ones(3)}
    places = {name: tensor.data_ptr() for name, tensor in targets.items()}
    with _sender(store, slab_nbytes=1024) as sender:
        targets["w"] = torch.zeros(700)  # larger than a slab, so it must be contiguous
        places["w"] = targets["w"].data_ptr()
        with _into(store, targets) as receiver:
            for version in (1, 2):
                _exchange(sender, [receiver], version)
                assert targets["w"].eq(version).all() and targets["b"].item() == version
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == places
    assert targets["other"].eq(1).all()


def test_tied_tensors_reach_targets_that_are_not_tied(store: Store) -> None:
    weight = torch.arange(5.0)
    targets = {"embed": torch.zeros(5), "head": torch.zeros(5)}
    with _sender(store) as sender, _into(store, targets) as receiver:
        waiting = _beside(lambda: receiver.receive(timeout_s=10.0))
        sender.publish(1, [("embed", weight), ("head", weight)])
        waiting()
    assert torch.equal(targets["embed"], weight) and torch.equal(targets["head"], weight)


def test_a_failed_transfer_into_tensors_leaves_no_version_and_the_next_mends_them(store: Store) -> None:
    targets = {"w": torch.zeros(700), "b": torch.zeros(())}
    backend = CorruptingBackend(at=2)  # a slab and the sums are one version
    with _sender(store) as sender, WeightReceiver(store, replica="r0", backend=backend, into=targets) as receiver:
        _exchange(sender, [receiver], 1)
        waiting = _beside(lambda: receiver.receive(timeout_s=10.0))
        assert "corrupt" in sender.publish(2, _model(2)).quarantined["r0"]
        with pytest.raises(QuarantinedError):
            waiting()
        assert receiver.version is None
        receiver.join()
        _exchange(sender, [receiver], 2)
        assert receiver.version == 2 and targets["w"].eq(2).all()


def test_an_offer_that_comes_between_two_looks_is_not_overslept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hwrl.weights.receiver._WATCH_S", 5.0)
    with _sender(store, transport="host", directory=tmp_path) as sender, _receiver(store) as receiver:
        look = receiver._board.newest

        def look_and_be_late() -> int:
            newest = look()
            if sender.version is None:
                sender.publish(1, _model(1))
            return newest

        monkeypatch.setattr(receiver._board, "newest", look_and_be_late)
        begin = time.monotonic()
        assert receiver.receive(timeout_s=10.0).version == 1
        assert time.monotonic() - begin < 4.0


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ({"w": torch.zeros(700)}, "'b' cannot be received in place[\\s\\S]*no tensor of this name"),
        ({"w": torch.zeros(70), "b": torch.zeros(())}, r"has it as torch.float32 \[700\], the receiver as"),
        ({"w": torch.zeros(1400)[::2], "b": torch.zeros(())}, "larger than a slab of 1,024 bytes and not contiguous"),
    ],
    ids=["missing", "shape", "strided"],
)
def test_targets_that_do_not_fit_are_named_and_hold_nobody_up(
    store: Store, targets: dict[str, torch.Tensor], why: str
) -> None:
    with _sender(store, slab_nbytes=1024) as sender, _into(store, targets) as receiver:
        publishing = _beside(lambda: sender.publish(1, _model(1)))
        with pytest.raises(LayoutMismatchError, match=why):
            receiver.receive(timeout_s=10.0)
        assert publishing().receivers == 0
        assert not any(tensor.any() for tensor in targets.values())


class _Made:
    """Weights that are made while they are read; counts how many are alive at once, and how often it was read."""

    def __init__(self, count: int) -> None:
        self.count, self.alive, self.most, self.read = count, 0, 0, 0

    def metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"t{number}", torch.empty(2000, device="meta")) for number in range(self.count))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.read += 1
        for number in range(self.count):
            tensor = torch.full((2000,), float(number))
            weakref.finalize(tensor, self._forget)
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield f"t{number}", tensor

    def _forget(self) -> None:
        self.alive -= 1


def test_tensors_that_are_made_while_they_are_read_are_not_all_held(store: Store) -> None:
    made = _Made(50)
    with _sender(store, slab_nbytes=8192, slabs=2) as sender, _receiver(store) as receiver:
        waiting = _beside(lambda: receiver.receive(timeout_s=10.0))
        sender.publish(1, made)
        received = waiting()
    assert [int(received[f"t{number}"][0]) for number in range(50)] == list(range(50))
    assert made.read == 1 and made.most <= 6


def test_waiting_says_who_came_and_what_was_not_offered(store: Store) -> None:
    with _sender(store) as sender, _receiver(store, "only") as receiver:
        with pytest.raises(CommTimeoutError, match=r"1 of 2 receivers joined[\s\S]*\['only'\]"):
            sender.wait_for_receivers(2, timeout_s=0.05)
        with pytest.raises(CommTimeoutError, match="no new version of 'policy' was offered to 'only'"):
            receiver.receive(timeout_s=0.05)


def test_two_links_of_one_store_do_not_meet(store: Store) -> None:
    with _sender(store) as sender, _sender(store, name="critic") as critic, _receiver(store) as receiver:
        assert critic.publish(4, _model(4)).receivers == 0
        _exchange(sender, [receiver], 1)


def test_host_versions_wait_for_late_joiners_and_skip_to_the_newest(store: Store, tmp_path: Path) -> None:
    with _sender(store, transport="host", directory=tmp_path) as sender:
        for version in (1, 2, 3):
            assert sender.publish(version, _model(version)).receivers == 0
        with _receiver(store, "late") as late:
            assert (late.poll(), sender.joiners()) == (3, ())
            received = late.receive(timeout_s=1.0)
            assert (received.version, received["w"][0].item(), late.poll()) == (3, 3.0, None)
            assert sender.publish(4, _model(4)).receivers == 1
            assert received["w"][0].item() == 3.0
            assert late.receive(timeout_s=1.0)["w"][0].item() == 4.0


def test_corrupted_host_bytes_are_refused_and_the_old_version_stays(store: Store, tmp_path: Path) -> None:
    with _sender(store, transport="host", directory=tmp_path) as sender, _receiver(store) as receiver:
        sender.publish(1, _model(1))
        old = receiver.receive(timeout_s=1.0)
        sender.publish(2, _model(2))
        (changed,) = [path for path in tmp_path.glob("*/[0-9]*") if path.read_bytes()[:4] == b"\x00\x00\x00\x40"]
        with changed.open("r+b") as file:
            file.write(b"\x01")
        with pytest.raises(
            TransferFailedError, match=r"other bytes came than were written \(corrupt: slabs \[0\] of 1"
        ):
            receiver.receive(timeout_s=1.0)
        assert receiver.version == 1 and old["w"][0].item() == 1.0
        sender.publish(3, _model(3))
        assert receiver.receive(timeout_s=1.0).version == 3


_SLABS = {"slab_nbytes": 4096, "transport": "host"}


def _slabs(value: float) -> list[tuple[str, torch.Tensor]]:
    """Four slabs of 4096 bytes."""
    return [("w", torch.full((4, 1024), float(value)))]


@pytest.mark.parametrize("there", [0, 2])
def test_a_receiver_follows_while_the_version_is_written_and_may_time_out_and_come_again(
    store: Store, tmp_path: Path, there: int
) -> None:
    reached, gate = threading.Event(), threading.Event()

    def reach() -> None:
        reached.set()
        assert gate.wait(20.0)

    backend = LateBackend(at=1 + there, reach=reach)
    with _sender(store, backend=backend, directory=tmp_path, **_SLABS) as sender, _receiver(store) as receiver:
        publishing = _beside(lambda: sender.publish(1, _slabs(1)))
        assert reached.wait(20.0)
        with pytest.raises(CommTimeoutError, match=rf"still being written[\s\S]*{there} of 4 slabs are there"):
            receiver.receive(timeout_s=0.05)
        assert receiver.poll() == 1
        gate.set()
        received = receiver.receive(timeout_s=10.0)
        assert publishing().version == received.version == 1
        assert torch.equal(received["w"], _slabs(1)[0][1])


def test_after_a_failure_in_mid_write_the_version_before_is_still_there_for_who_lacks_it(
    store: Store, tmp_path: Path
) -> None:
    def reach() -> None:
        if failing:
            raise OSError("the device fell off the bus")

    failing = False
    backend = LateBackend(at=3, reach=reach)
    with _sender(store, backend=backend, directory=tmp_path, **_SLABS) as sender, _receiver(store, "old") as old:
        sender.publish(1, _slabs(1))
        kept = old.receive(timeout_s=1.0)
        keys = store.num_keys()
        failing = True
        with pytest.raises(OSError, match="fell off the bus"):
            sender.publish(2, _slabs(2))
        with pytest.raises(TransferFailedError, match=r"version 2 will never be whole[\s\S]*its sender failed"):
            old.receive(timeout_s=1.0)
        assert (old.version, old.poll(), kept["w"].sum().item()) == (1, None, 4096.0)
        with _receiver(store, "late") as late:
            received = late.receive(timeout_s=1.0)
            assert (received.version, late.version, late.poll()) == (1, 1, None)
            assert torch.equal(received["w"], _slabs(1)[0][1])
        failing = False
        sender.publish(3, _slabs(3))
        assert old.receive(timeout_s=1.0)["w"].sum().item() == 3 * 4096.0
        assert store.num_keys() == keys


def test_as_many_versions_are_kept_as_are_read(store: Store, tmp_path: Path) -> None:
    options = {"versions": 3, "timeout_s": 0.05, "directory": tmp_path}
    with _sender(store, transport="host", **options) as sender, contextlib.ExitStack() as claims:
        places = []
        for version in (1, 2):
            sender.publish(version, _model(version))
            reader = claims.enter_context(_receiver(store, f"reads {version}"))
            offer = reader._board.offer(reader._board.newest())
            assert offer is not None
            places.append(claims.enter_context(reader._host.claim(offer, StageClock())))
        sender.publish(3, _model(3))
        assert [place.slabs[0][:4].view(torch.float32).item() for place in places if place] == [1.0, 2.0]
        with pytest.raises(TransferFailedError, match="receivers have been reading all 2 older"):
            sender.publish(4, _model(4))


class RegisteringBackend(CpuBackend):
    """The CPU, which notes what is page-locked; it ``refuses`` as a device without the capability does."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(INFO)
        self.refuses, self.registered = refuses, 0
        self.calls: list[int] = []

    def register_host_memory(self, memory: torch.Tensor) -> None:
        if self.refuses:
            raise UnsupportedError("cannot page-lock", why="the test says so", fix="ask the test")
        self.registered += 1
        self.calls.append(memory.nbytes)

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        self.registered -= 1


def test_each_end_page_locks_each_place_once_and_releases_it(store: Store, tmp_path: Path) -> None:
    mine, theirs = RegisteringBackend(), RegisteringBackend()
    receiver = WeightReceiver(store, replica="r0", backend=theirs)
    with _sender(store, backend=mine, transport="host", directory=tmp_path) as sender:
        for version in range(6):
            report = sender.publish(version, _model(version))
            assert receiver.receive(timeout_s=1.0).version == version
            assert {"claim", "register", "copy"} < report.seconds.keys()
            assert (mine.registered, theirs.registered) == (2, 2)
        assert mine.registered == theirs.registered == len(mine.calls) == len(theirs.calls) == 2
        with _sender(store, backend=mine, transport="host", directory=tmp_path) as other:
            other.publish(0, _model(0))
            receiver.receive(timeout_s=1.0)
            assert (mine.registered, theirs.registered) == (4, 2)
    receiver.close()
    assert mine.registered == theirs.registered == 0


def test_without_page_locking_weights_travel_and_a_warning_says_so(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = RegisteringBackend(refuses=True)
    with _sender(store, backend=backend, transport="host", directory=tmp_path) as sender, _receiver(store) as receiver:
        sender.publish(1, _model(1))
        assert receiver.receive(timeout_s=1.0)["b"].item() == 1.0
    assert "not page-locked" in caplog.text and "the test says so" in caplog.text


def test_a_closed_host_sender_is_named(store: Store, tmp_path: Path) -> None:
    with _sender(store, transport="host", directory=tmp_path) as sender:
        sender.publish(1, _model(1))
    with _receiver(store) as receiver, pytest.raises(TransferFailedError, match="its sender has closed it"):
        receiver.receive(timeout_s=1.0)


def test_the_store_does_not_grow_with_versions(store: Store) -> None:
    with _sender(store) as sender, _receiver(store) as receiver:
        for version in range(3):
            _exchange(sender, [receiver], version)
        before = store.num_keys()
        for version in range(3, 9):
            _exchange(sender, [receiver], version)
        assert store.num_keys() == before


def test_wrong_options_are_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="no transport 'carrier pigeon'"):
        _sender(store, transport="carrier pigeon")
    with pytest.raises(ConfigError, match="versions=1"):
        _sender(store, transport="host", versions=1)
    with _sender(store) as sender, pytest.raises(TransferFailedError, match="more than text and numbers"):
        sender.publish(1, _model(1), {"config": {"lr": 1}})  # type: ignore[dict-item]  # that is the point


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"number":1}',
        b"\xff",
        b"[" * 100_000,
        b'{"number":1,"epoch":1,"version":"x","transport":"device","layout":""}',
    ],
    ids=["empty", "list", "nothing", "cut", "binary", "deep", "type"],
)
def test_an_unreadable_offer_is_refused(text: bytes) -> None:
    with pytest.raises(TransferFailedError, match="an offer cannot be read"):
        Offer.read(text)


def test_a_lost_store_is_named() -> None:
    served = serve_store()
    receiver = _receiver(connect_store(store_address(served)))
    del served
    with pytest.raises(PeerLostError, match="the store cannot be reached"):
        receiver.poll()
