"""What a user is told when the device is full, a peer dies, or a process is forked."""

from __future__ import annotations

import multiprocessing
import re
import time
from typing import Any

import pytest
import torch

import hwrl
from hwrl.comm import Comm, await_keys, connect_store, serve_store, store_address
from hwrl.errors import CommError, DeviceMemoryError
from hwrl.testing.processes import Processes
from tests.support.speed import slow

_TIMEOUT_S = slow(4.0)


def test_a_full_device_is_told_with_its_numbers() -> None:
    backend = hwrl.get_backend()
    total = backend.memory_info().total_nbytes
    with pytest.raises(DeviceMemoryError) as caught, backend.allocating("the model"):
        torch.empty(2 * total, dtype=torch.uint8, device=backend.device())
    assert caught.value.what == "the model does not fit in the memory of npu:0"
    assert re.match(rf"[\d.]+ GiB of its {total / (1 << 30):.2f} GiB are free; tensors", caught.value.why)
    assert torch.ones(3, device=backend.device()).sum().item() == 3.0, "the device is of use afterwards"


def _lose_the_peer(rank: int, address: str) -> tuple[float, str]:
    """Return how long an all_reduce waited for a peer that is dead, and what was said then."""
    backend, store = hwrl.get_backend(), connect_store(address)
    backend.set_device(rank)
    group = Comm(backend).standalone_group(store, rank=rank, size=2, name="trainers", timeout_s=_TIMEOUT_S)
    group.warm_up()
    store.set(f"warm/{rank}", "")
    if rank == 1:
        await_keys(store, ["never"], timeout_s=600.0)
    await_keys(store, ["killed"], timeout_s=600.0)
    began_s = time.monotonic()
    with pytest.raises(CommError) as caught:
        group.all_reduce(torch.ones(1000, device=backend.device()), async_op=True).complete()
    return time.monotonic() - began_s, str(caught.value)


@pytest.mark.parametrize("mild", ["0", "1"], ids=["the device fails", "the device waits"])
def test_a_dead_peer_is_told_within_the_timeout_with_rank_and_group(monkeypatch: pytest.MonkeyPatch, mild: str) -> None:
    monkeypatch.setenv("NPUSIM_HCCL_MILD", mild)
    store = serve_store()
    with Processes(_lose_the_peer, 2, store_address(store), timeout_s=1200.0) as pair:
        assert not await_keys(store, ["warm/0", "warm/1"], timeout_s=600.0)
        pair.kill(1)
        pair.wait(1)
        store.set("killed", "")
        survivor = pair.wait(0)
    assert survivor.error is None, survivor.error
    waited_s, said = survivor.value
    assert waited_s < _TIMEOUT_S + slow(5.0)
    assert "all_reduce in group 'trainers' on rank 0 of 2" in said


def _use_the_device(answers: Any) -> None:
    try:
        torch.ones(1, device=hwrl.get_backend().device())
        answers.put("it worked")
    except Exception as exc:  # noqa: BLE001 - torch_npu's error is the answer
        answers.put(str(exc))


def test_a_forked_process_is_refused_the_device() -> None:
    torch.ones(1, device=hwrl.get_backend().device())
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_use_the_device, args=(answers,))
    child.start()
    assert "forked subprocess" in answers.get(timeout=600.0)
    child.join()
