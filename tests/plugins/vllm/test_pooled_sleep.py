"""vLLM's sleep backend with hwrl's memory, over an allocator whose device memory is the host's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plugins.vllm.serving import ON_HOST

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.skipif(not ON_HOST, reason="real sleep is in test_sleep.py"),
    pytest.mark.filterwarnings("default"),
]

LOST = 0xEE


class Allocator:
    """Has vLLM's interface; memory that is not mapped holds rubbish, and mapping it twice is an error."""

    def __init__(self) -> None:
        self.memory = {tag: torch.full((1000 + 8 * n,), n, dtype=torch.uint8) for n, tag in enumerate(TAGS)}
        self.pointer_to_data = {
            memory.data_ptr(): SimpleNamespace(tag=tag.split()[0], handle=(0, memory.numel(), memory.data_ptr(), 0))
            for tag, memory in self.memory.items()
        }
        self.unmapped: set[int] = set()
        self.woken: list[list[str] | None] = []

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for address, data in self.pointer_to_data.items():
            if data.tag not in offload_tags:
                self.unmapped.add(address)
        for memory in self.memory.values():
            if memory.data_ptr() in self.unmapped:
                memory.fill_(LOST)

    def wake_up(self, tags: list[str] | None) -> None:
        self.woken.append(tags)
        for address, data in self.pointer_to_data.items():
            if tags is None or data.tag in tags:
                self.unmapped.remove(address)

    def values(self) -> list[int]:
        assert all(len(set(memory.tolist())) == 1 for memory in self.memory.values())
        return [int(memory[0]) for memory in self.memory.values()]


TAGS = ["weights a", "kv_cache", "weights b"]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    registry = "vllm.device_allocator.sleep_mode_backend"
    pytest.importorskip(registry, reason="this vLLM keeps weights in its sleep itself: no backend can be registered")
    allocator = Allocator()
    for module in ("vllm.device_allocator", "hwrl_vllm.sleep"):
        monkeypatch.setattr(f"{module}.get_mem_allocator_instance", lambda: allocator)
    yield allocator


def backend() -> Any:
    from hwrl_vllm.sleep import PooledSleep

    return PooledSleep()


@pytest.mark.parametrize("wakes", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]])
def test_level_1_brings_the_weights_back_whatever_wakes_first(allocator: Allocator, wakes: list[Any]) -> None:
    sleeping = backend()
    for _ in range(2):
        sleeping.suspend(1)
        assert allocator.values() == [LOST] * 3
        for tags in wakes:
            sleeping.resume(tags)
        assert allocator.values() == [0, LOST, 2] and not allocator.unmapped


@pytest.mark.parametrize("tags", [None, ["kv_cache", "weights"]])
def test_the_weights_are_under_way_before_the_cache_is_mapped(allocator: Allocator, tags: list[str] | None) -> None:
    sleeping = backend()
    sleeping.suspend(1)
    sleeping.resume(tags)
    assert allocator.woken == [["weights"], ["kv_cache"]]


def test_an_update_after_a_wake_of_the_weights_is_kept_and_the_rest_comes_back(allocator: Allocator) -> None:
    sleeping = backend()
    sleeping.suspend(1)
    sleeping.resume(["weights"])
    assert allocator.values() == [LOST] * 3  # not copied: an update follows
    first, last = allocator.memory["weights a"], allocator.memory["weights b"]
    updated = [first[200:500], first[704:], last[:8]]
    for target in updated:
        target.fill_(7)
    sleeping.replaced(iter(updated))
    sleeping.resume(["kv_cache"])
    assert [set(target.tolist()) for target in updated] == [{7}] * 3
    assert {*first[:200].tolist(), *first[500:704].tolist()} == {0} and set(last[8:].tolist()) == {2}
    sleeping.suspend(1)
    sleeping.resume(None)
    assert [set(target.tolist()) for target in updated] == [{7}] * 3 and set(last[8:].tolist()) == {2}


def test_weights_that_were_woken_without_an_update_outlast_another_sleep(allocator: Allocator) -> None:
    sleeping = backend()
    sleeping.suspend(1)
    sleeping.resume(["weights"])
    sleeping.suspend(1)
    sleeping.resume(["weights"])
    sleeping.restore()
    assert allocator.values() == [0, LOST, 2]


def test_a_wake_that_found_no_memory_can_be_repeated(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping, wake_up = backend(), allocator.wake_up
    sleeping.suspend(1)

    def without_room(tags: list[str] | None) -> None:
        if tags == ["kv_cache"]:
            raise torch.OutOfMemoryError("no room")
        wake_up(tags)

    monkeypatch.setattr(allocator, "wake_up", without_room)
    with pytest.raises(torch.OutOfMemoryError):
        sleeping.resume(None)
    monkeypatch.setattr(allocator, "wake_up", wake_up)
    sleeping.resume(None)
    assert allocator.values() == [0, LOST, 2] and not allocator.unmapped


def test_level_2_brings_nothing_back_not_even_of_an_earlier_sleep(allocator: Allocator) -> None:
    sleeping = backend()
    sleeping.suspend(1)
    sleeping.resume(None)
    sleeping.suspend(2)
    sleeping.resume(["weights"])
    sleeping.resume(["kv_cache"])
    assert allocator.values() == [LOST] * 3 and not allocator.unmapped


def test_the_weights_memory_is_locked_before_the_first_sleep(allocator: Allocator) -> None:
    sleeping = backend()
    sleeping._locked.result()
    assert sleeping._pool.nbytes == 1000 + 1016


def test_vllm_finds_the_backend_by_its_name(allocator: Allocator) -> None:
    from hwrl_vllm.sleep import NAME, PooledSleep, pooled_sleep

    for _ in range(2):  # engines of one process
        config = SimpleNamespace(sleep_mode_backend="cumem")
        assert isinstance(pooled_sleep(config), PooledSleep) and config.sleep_mode_backend == NAME
