"""The promises of the weight link between real processes; some of them die."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hwrl.comm import await_keys, connect_store, serve_store, store_address
from hwrl.errors import CommTimeoutError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.testing.processes import Processes, run_processes
from hwrl.weights import Received, WeightReceiver, WeightSender
from hwrl.weights.report import StageClock
from hwrl.weights.transport import ReceiverContext
from hwrl.weights.transports.host import HostReceiver
from hwrl_cpu import INFO, CpuBackend
from tests.support.faulty import DyingBackend, LateBackend
from tests.support.sharded_weights import BUCKET_NBYTES, hard_weights, is_exact
from tests.support.speed import slow
from tests.support.weight_link import channel_of, newest_proposal


def _cpu() -> Backend:
    return CpuBackend(INFO)


# -- every transport carries a hard model --------------------------------------------------------------------------


def _send_and_receive(rank: int, address: str, transport: Any) -> Any:
    store = connect_store(address)
    if rank == 0:
        with WeightSender(store, backend=_cpu(), transport=transport, bucket_nbytes=BUCKET_NBYTES) as sender:
            sender.wait_for_receivers(2)
            reports = []
            for version in (3, 4, 9):
                reports.append(sender.publish(version, hard_weights(version), {"step": version, "note": "x"}))
                assert not await_keys(store, [f"got {version}/{peer}" for peer in (1, 2)], timeout_s=600.0)
            return [(report.version, report.receivers, dict(report.excluded)) for report in reports]
    into = {name: torch.zeros_like(tensor) for name, tensor in hard_weights(0)} if rank == 2 else None
    with WeightReceiver(store, replica=f"r{rank}", backend=_cpu(), into=into) as receiver:
        before: Received | None = None
        exact = []
        for version in (3, 4, 9):
            received = receiver.receive(timeout_s=600.0)
            assert received.version == receiver.version == version
            assert received.metadata == {"step": version, "note": "x"}
            assert receiver.poll() is None
            exact.append(is_exact(received, version, tied=into is None))
            if before is not None and into is None:  # it is whole until the next receive begins
                exact.append(is_exact(before, before.version))
            before = received
            store.set(f"got {version}/{rank}", "")
        return all(exact), dist.is_initialized(), sorted(received.seconds)


@pytest.mark.parametrize(
    ("transport", "stages"),
    [("device", ["rendezvous", "vote", "wait", "wire"]), ("host", ["copy", "register", "wait"])],
)
def test_a_hard_model_arrives_bit_for_bit_in_new_memory_and_in_untied_tensors(
    transport: str, stages: list[str]
) -> None:
    store = serve_store()
    sent, *received = run_processes(_send_and_receive, 3, store_address(store), transport)
    assert sent == [(version, 2, {}) for version in (3, 4, 9)]
    assert received == [(True, False, stages)] * 2


# -- the device transport when something breaks --------------------------------------------------------------------


def _send_past_a_death(rank: int, address: str, dies: int) -> Any:
    store = connect_store(address)
    if rank == 0:
        store.set("joined 0", "")
        with WeightSender(store, backend=_cpu(), bucket_nbytes=BUCKET_NBYTES, timeout_s=600.0) as sender:
            sender.wait_for_receivers(3)
            begin = time.monotonic()
            first = sender.publish(1, hard_weights(1))
            took_s = time.monotonic() - begin
            second = sender.publish(2, hard_weights(2))
            return first.receivers, dict(first.excluded), took_s, second.receivers, dict(second.excluded)
    backend = DyingBackend(at=3) if rank == dies else _cpu()
    store.get(f"joined {rank - 1}")  # the order decides who sends on to whom in a broadcast
    with WeightReceiver(store, replica=f"r{rank}", backend=backend) as receiver:
        store.set(f"joined {rank}", "")
        versions = []
        for _ in range(2):
            received = receiver.receive(timeout_s=600.0)
            assert is_exact(received, received.version)
            versions.append(received.version)
        return versions


@pytest.mark.parametrize("dies", [2, 3], ids=["next-to-the-sender", "behind-another-receiver"])
def test_a_receiver_killed_in_mid_transfer_is_named_and_the_others_get_the_version(dies: int) -> None:
    store = serve_store()
    with Processes(_send_past_a_death, 4, store_address(store), dies) as processes:
        receivers, excluded, took_s, later, later_excluded = processes.wait(0).value
        assert (receivers, later, later_excluded) == (2, 2, {})
        assert excluded.keys() == {f"r{dies}"} and "was lost in the transfer" in excluded[f"r{dies}"]
        assert took_s < 300.0
        assert [processes.wait(rank).value for rank in (1, 2, 3) if rank != dies] == [[1, 2]] * 2
        assert "exit code -9" in str(processes.wait(dies).error)


def _sender_dies(rank: int, address: str) -> Any:
    store = connect_store(address)
    if rank == 0:
        with WeightSender(store, backend=_cpu(), bucket_nbytes=BUCKET_NBYTES) as sender:
            sender.wait_for_receivers(1)
            sender.publish(7, hard_weights(7))
        with WeightSender(store, backend=DyingBackend(at=3), bucket_nbytes=BUCKET_NBYTES) as sender:
            sender.publish(8, hard_weights(8))
        return None
    if rank == 1:
        with WeightReceiver(store, replica="r1", backend=_cpu()) as receiver:
            old = receiver.receive(timeout_s=600.0)
            store.set("has 7", "")
            received = receiver.receive(timeout_s=600.0)  # waits for the dead sender until it hears of the next
            assert is_exact(old, 7) and is_exact(received, 2)
            return receiver.version
    number = (1 << 32) + 2  # the first proposal of the second sender
    before = ["has 7", f"weights/policy/proposal/{number}", f"weights/policy/ready/{number}/1", "the sender is dead"]
    assert not await_keys(store, before, timeout_s=300.0)
    with WeightSender(store, backend=_cpu(), bucket_nbytes=BUCKET_NBYTES, timeout_s=600.0) as sender:
        return sender.publish(2, hard_weights(2)).receivers


def test_receivers_keep_the_old_version_when_the_sender_dies_and_follow_a_restarted_one_back() -> None:
    store = serve_store()
    with Processes(_sender_dies, 3, store_address(store)) as processes:
        assert "exit code -9" in str(processes.wait(0).error)
        store.set("the sender is dead", "")  # an earlier next sender would depose it instead
        assert processes.wait(1).value == 2, processes.wait(1).error
        assert processes.wait(2).value == 1, processes.wait(2).error


# -- the host transport when something breaks ----------------------------------------------------------------------


def _hold_a_claim(rank: int, address: str) -> None:
    store = connect_store(address)
    proposal, receiver = newest_proposal(store), HostReceiver(ReceiverContext(store, _cpu(), 4))
    with receiver.hold(proposal, channel_of(store).layout(proposal), StageClock()) as version:
        assert version is not None
        store.set("claimed", "")
        await_keys(store, ["never"], timeout_s=500.0)


def test_a_killed_reader_gives_its_claim_back() -> None:
    store = serve_store()
    with WeightSender(store, backend=_cpu(), transport="host", versions=2, timeout_s=0.2) as sender:
        sender.publish(1, hard_weights(1))
        with Processes(_hold_a_claim, 1, store_address(store)) as processes:
            assert not await_keys(store, ["claimed"], timeout_s=300.0)
            sender.publish(2, hard_weights(2))
            with pytest.raises(TransferFailedError, match="receivers have been reading all 1 others"):
                sender.publish(3, hard_weights(3))
            processes.kill(0)
            processes.wait(0)
            assert sender.publish(3, hard_weights(3)).version == 3


def _publish_and_stop_in_mid_write(rank: int, address: str) -> None:
    store = connect_store(address)

    def reach() -> None:
        if sender.version == 1:
            store.set("in mid-write", "")
            await_keys(store, ["never"], timeout_s=500.0)

    backend = LateBackend(at=3, reach=reach, and_later=True)
    sender = WeightSender(store, backend=backend, transport="host", bucket_nbytes=BUCKET_NBYTES)
    sender.publish(1, hard_weights(1))
    assert not await_keys(store, ["version 1 was taken"], timeout_s=300.0)
    sender.publish(2, hard_weights(2))


def test_a_version_whose_sender_was_killed_in_mid_write_is_never_taken_and_its_files_vanish() -> None:
    store, before = serve_store(), set(Path("/dev/shm").iterdir())
    with (
        Processes(_publish_and_stop_in_mid_write, 1, store_address(store)) as processes,
        WeightReceiver(store, replica="old", backend=_cpu()) as old,
        WeightReceiver(store, replica="late", backend=_cpu()) as late,
    ):
        kept = old.receive(timeout_s=300.0)
        store.set("version 1 was taken", "")
        assert not await_keys(store, ["in mid-write"], timeout_s=300.0)
        with pytest.raises(CommTimeoutError, match="version 2 is still being written"):
            old.receive(timeout_s=slow(0.5))
        processes.kill(0)
        processes.wait(0)
        with pytest.raises(TransferFailedError, match=r"version 2 will never be complete[\s\S]*its sender died"):
            old.receive(timeout_s=600.0)
        assert (old.version, old.poll()) == (1, None) and is_exact(kept, 1)
        left = set(Path("/dev/shm").iterdir()) - before
        assert not [path for path in left if path.name.startswith("hwrl-weights")]
        with pytest.raises(TransferFailedError, match=r"is not on this host[\s\S]*is dead"):
            late.receive(timeout_s=600.0)
        with WeightSender(store, backend=_cpu(), transport="host") as sender:
            sender.publish(2, hard_weights(2))
            assert is_exact(old.receive(timeout_s=600.0), 2) and is_exact(late.receive(timeout_s=600.0), 2)
