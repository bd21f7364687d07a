"""hwrl.comm on a device with streams, where a call only queues an operation: the host learns of failures in complete().

The device is imitated: Gloo works in threads of its own anyway, so all it takes is that nobody waits for it.
"""

import threading
import time
from typing import Any

import pytest
import torch

from hwrl.comm import Comm, Group, await_keys, connect_store, serve_store, store_address
from hwrl.errors import CommAbortedError, CommError, CommTimeoutError, PeerLostError
from hwrl.interfaces import Capability, Support
from hwrl.testing.processes import Processes, run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow

TIMEOUT_S = slow(0.5)
SOON_S = slow(200.0)  # far below every other limit of these tests


class QueueingBackend(CpuBackend):
    """The CPU, whose collectives go on after ``wait``."""

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.STREAMS:
            return Support("supported", "imitated")
        return super().supports(capability)

    def await_work(self, work: Any) -> None:
        """Return at once, as a stream that is told to wait does."""


def _pair(rank: int, address: str) -> Group:
    store = connect_store(address)
    group = Comm(QueueingBackend(INFO)).standalone_group(store, rank=rank, size=2, name="pair", timeout_s=300.0)
    assert isinstance(group, Group)
    group.warm_up()
    group.timeout_s = TIMEOUT_S
    return group


def _wait_and_complete(rank: int, address: str) -> list[float]:
    with _pair(rank, address) as group:
        tensor = torch.full((1 << 20,), float(rank))
        pending = group.broadcast(tensor, src=1, async_op=True)
        pending.wait()
        pending.complete()
        pending.complete()
        return [tensor.mean().item()]


def test_complete_blocks_until_the_data_is_there() -> None:
    store = serve_store()
    assert run_processes(_wait_and_complete, 2, store_address(store)) == [[1.0], [1.0]]


def _meet_nobody(rank: int, address: str) -> float:
    group, store = _pair(rank, address), connect_store(address)
    if rank == 1:
        assert not await_keys(store, ["over"], timeout_s=600.0)
        return 0.0
    begin = time.monotonic()
    pending = group.recv(torch.zeros(4), src=1, async_op=True)
    pending.wait()  # returns: the host is ahead of the device
    with pytest.raises(CommTimeoutError, match=f"recv from rank 1 .*group 'pair' on rank 0 .* within {TIMEOUT_S:g} s"):
        pending.complete()
    passed_s = time.monotonic() - begin
    with pytest.raises(CommAbortedError, match=f"did not finish within {TIMEOUT_S:g} s"):
        group.barrier()
    with group.rebuild(survivors=[0]) as alone:
        alone.barrier()
    store.set("over", "")
    return passed_s


def test_a_peer_that_does_not_come_is_a_timeout_and_frees_the_group() -> None:
    store = serve_store()
    passed_s, _ = run_processes(_meet_nobody, 2, store_address(store))
    assert TIMEOUT_S <= passed_s < SOON_S


def _close_what_was_only_queued(rank: int, address: str) -> list[float]:
    group, store = _pair(rank, address), connect_store(address)
    group.timeout_s = 600.0
    tensor = torch.full((1 << 20,), float(rank))
    if rank == 0:
        group.broadcast(tensor, src=0)
        threading.Timer(0.5, store.set, ("come", "")).start()
        group.close()  # waits until the other has come
        return [tensor.mean().item()]
    assert not await_keys(store, ["come"], timeout_s=600.0)
    group.broadcast(tensor, src=0, async_op=True).complete()
    group.close()
    return [tensor.mean().item()]


def test_close_lets_what_is_queued_reach_the_peers() -> None:
    store = serve_store()
    assert run_processes(_close_what_was_only_queued, 2, store_address(store)) == [[0.0], [0.0]]


def _close_what_cannot_end(rank: int, address: str) -> float:
    group, store = _pair(rank, address), connect_store(address)
    if rank == 1:
        assert not await_keys(store, ["over"], timeout_s=600.0)
        return 0.0
    group.recv(torch.zeros(4), src=1)
    group.broadcast(torch.empty(0), src=1)  # queues nothing
    begin = time.monotonic()
    group.close()
    store.set("over", "")
    return time.monotonic() - begin


def test_close_ends_what_cannot_end() -> None:
    store = serve_store()
    passed_s, _ = run_processes(_close_what_cannot_end, 2, store_address(store))
    assert TIMEOUT_S <= passed_s < SOON_S


def _close_while_another_thread_waits(rank: int, address: str) -> str:
    group, store = _pair(rank, address), connect_store(address)
    if rank == 1:
        assert not await_keys(store, ["over"], timeout_s=600.0)
        return ""
    group.timeout_s = 600.0
    ended: list[CommError] = []

    def receive() -> None:
        try:
            group.recv(torch.zeros(4), src=1, async_op=True).complete()
        except CommError as error:
            ended.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    while not group.watchers:
        time.sleep(0.001)
    group.close()
    waiting.join(500.0)
    store.set("over", "")
    return type(ended[0]).__name__ if ended else "still waiting"


def test_close_ends_what_another_thread_waits_for() -> None:
    store = serve_store()
    ended, _ = run_processes(_close_while_another_thread_waits, 2, store_address(store))
    assert ended == "CommAbortedError"


def _lose_a_peer(rank: int, address: str) -> str:
    group, store = _pair(rank, address), connect_store(address)
    group.timeout_s = 600.0
    if rank == 1:
        store.set("ready", "")
        time.sleep(60.0)  # killed long before
    pending = group.broadcast(torch.zeros(4), src=1, async_op=True)
    with pytest.raises(PeerLostError):
        pending.complete()
    with pytest.raises(CommAbortedError, match="lost a peer"):
        group.barrier()
    return "survived"


def test_a_killed_peer_is_lost_at_once() -> None:
    store = serve_store()
    with Processes(_lose_a_peer, 2, store_address(store)) as pair:
        assert not await_keys(store, ["ready"], timeout_s=400.0)
        pair.kill(1)
        assert pair.wait(0).value == "survived", pair.wait(0).error
