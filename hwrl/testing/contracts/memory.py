"""The contracts of device memory, of pinned host memory, and of a model's moves between them."""

from __future__ import annotations

import mmap
from typing import ClassVar

import pytest
import torch
from torch import nn

from hwrl.errors import MemoryStateError
from hwrl.interfaces import Backend, Capability
from hwrl.memory import Offloader
from hwrl.memory.pool import host_empty
from hwrl.testing.contracts.need import need
from hwrl.testing.levels import Level

MIB = 1 << 20
_SLACK_NBYTES = 2 * MIB


class PinnedMemoryContract:
    """Page-locked host memory is separate host memory, and copies through it are exact."""

    level: ClassVar[Level] = Level.DEVICE

    @pytest.fixture(autouse=True)
    def _only_where_usable(self, backend: Backend) -> None:
        need(backend, Capability.PINNED_MEMORY)

    @pytest.mark.parametrize("nbytes", [0, 1, 4097, 3 * MIB])
    def test_it_is_bytes_on_the_host(self, backend: Backend, nbytes: int) -> None:
        """A 1-d uint8 tensor of the requested size; the host can write and read it."""
        pinned = backend.pinned_empty(nbytes)
        assert (pinned.device.type, pinned.dtype, tuple(pinned.shape)) == ("cpu", torch.uint8, (nbytes,))
        pinned.fill_(7)
        assert int(pinned.sum()) == 7 * nbytes

    def test_it_is_page_locked(self, backend: Backend) -> None:
        """torch reports the memory as pinned, unless the device is the host itself."""
        assert backend.device().type == "cpu" or backend.pinned_empty(MIB).is_pinned()

    def test_two_pieces_do_not_overlap(self, backend: Backend) -> None:
        """Each call returns new memory."""
        first, second = backend.pinned_empty(MIB), backend.pinned_empty(MIB)
        first.fill_(1)
        second.fill_(2)
        assert int(first.max()) == 1

    def test_it_is_aligned_for_every_dtype(self, backend: Backend) -> None:
        """It begins at a multiple of 64 bytes, because a slab holds tensors of any dtype."""
        assert backend.pinned_empty(MIB).data_ptr() % 64 == 0

    def test_it_is_no_device_memory(self, backend: Backend) -> None:
        """It must not count as device memory; otherwise an offload frees nothing."""
        need(backend, Capability.MEMORY_STATS)
        before = backend.memory_info().allocated_nbytes
        pinned = backend.pinned_empty(64 * MIB)
        grown = backend.memory_info().allocated_nbytes - before
        assert grown < pinned.numel() // 2

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
    def test_copies_there_and_back_are_exact(self, backend: Backend, dtype: torch.dtype) -> None:
        """Copies in both directions are asynchronous, and complete after the stream is synchronised."""
        source = torch.randint(0, 100, (100_003,)).to(dtype)
        pinned = backend.pinned_empty(source.nbytes).view(dtype)
        pinned.copy_(source.to(backend.device()), non_blocking=True)
        backend.current_stream().synchronize()
        back = pinned.to(backend.device(), non_blocking=True)
        assert torch.equal(back.cpu(), source)


class RegisteredMemoryContract:
    """Existing host memory can be page-locked in place, if the backend supports it."""

    level: ClassVar[Level] = Level.DEVICE

    @pytest.fixture(autouse=True)
    def _only_where_usable(self, backend: Backend) -> None:
        need(backend, Capability.REGISTERED_MEMORY)

    def test_shared_memory_is_page_locked_until_it_is_unregistered(self, backend: Backend) -> None:
        """It keeps its bytes, and copies to and from it are exact. It can be registered a second time."""
        memory = torch.frombuffer(mmap.mmap(-1, 3 * MIB), dtype=torch.uint8)
        for value in (7, 8):
            memory.fill_(value)
            backend.register_host_memory(memory)
            assert backend.device().type == "cpu" or memory.is_pinned()
            memory.copy_(memory.to(backend.device(), non_blocking=True) + 1, non_blocking=True)
            backend.current_stream().synchronize()
            backend.unregister_host_memory(memory)
            assert backend.device().type == "cpu" or not memory.is_pinned()
            assert int(memory.sum()) == (value + 1) * memory.numel()


class DeviceMemoryContract:
    """The statistics are right, and freed memory is available again."""

    level: ClassVar[Level] = Level.DEVICE

    @pytest.fixture(autouse=True)
    def _only_where_usable(self, backend: Backend) -> None:
        need(backend, Capability.MEMORY_STATS)

    def test_the_numbers_fit_each_other(self, backend: Backend) -> None:
        """Each is 0 or more: free <= total, and a tensor <= allocated <= reserved <= total."""
        held = torch.ones(16 * MIB, dtype=torch.uint8, device=backend.device())
        info = backend.memory_info()
        assert 0 <= info.free_nbytes <= info.total_nbytes
        assert held.nbytes <= info.allocated_nbytes <= info.reserved_nbytes <= info.total_nbytes
        assert info.peak_nbytes >= held.nbytes

    def test_what_tensors_hold_is_counted(self, backend: Backend) -> None:
        """The count grows by a new tensor's size, and shrinks after its deletion."""
        before = backend.memory_info().allocated_nbytes
        held = torch.ones(64 * MIB, dtype=torch.uint8, device=backend.device())
        assert abs(backend.memory_info().allocated_nbytes - before - held.nbytes) <= _SLACK_NBYTES
        del held
        assert abs(backend.memory_info().allocated_nbytes - before) <= _SLACK_NBYTES

    def test_freed_memory_is_given_back(self, backend: Backend) -> None:
        """After ``empty_cache`` unused memory is available to other processes."""
        backend.empty_cache()
        before = backend.memory_info().reserved_nbytes
        held = torch.ones(256 * MIB, dtype=torch.uint8, device=backend.device())
        assert backend.memory_info().reserved_nbytes - before >= held.nbytes // 2
        del held
        backend.empty_cache()
        assert backend.memory_info().reserved_nbytes - before <= 16 * MIB

    def test_no_memory_leaks(self, backend: Backend) -> None:
        """Twenty copies to the host leave no device memory allocated."""
        self._allocate_and_free(backend)
        before = backend.memory_info().allocated_nbytes
        for _ in range(20):
            self._allocate_and_free(backend)
        assert backend.memory_info().allocated_nbytes - before <= _SLACK_NBYTES

    def _allocate_and_free(self, backend: Backend) -> None:
        host = host_empty(backend, 4 * MIB)
        host.copy_(torch.ones(4 * MIB, dtype=torch.uint8, device=backend.device()))


class OffloadContract:
    """A model is unchanged after an offload and a load, and its device memory is free between them."""

    level: ClassVar[Level] = Level.DEVICE

    def test_a_model_survives_the_way(self, backend: Backend) -> None:
        """Parameters and optimizer state are equal bit for bit, and training continues with the same results."""
        moved, stayed = _trained(backend), _trained(backend)
        with Offloader(*moved, backend=backend) as offloader:
            offloader.offload()
            offloader.load()
            for model, optimizer in (moved, stayed):
                _step(model, optimizer, backend)
            pairs = zip(moved[0].parameters(), stayed[0].parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)

    def test_its_device_memory_is_free(self, backend: Backend) -> None:
        """The count of device memory falls by the size of the parameters and the optimizer's state."""
        need(backend, Capability.MEMORY_STATS)
        model, optimizer = _trained(backend)
        optimizer.zero_grad()
        held = 3 * sum(parameter.nbytes for parameter in model.parameters())  # with Adam's two moments
        with Offloader(model, optimizer, backend=backend) as offloader:
            before = backend.memory_info().allocated_nbytes
            offloader.offload()
            assert before - backend.memory_info().allocated_nbytes >= 0.9 * held

    def test_offloaded_memory_cannot_be_used(self, backend: Backend) -> None:
        """A forward pass raises. ``loaded`` offloads again at its end, after an error, too."""
        model, _ = _trained(backend)
        with Offloader(model, backend=backend) as offloader:
            offloader.offload()
            with pytest.raises(KeyError), offloader.loaded():
                model(_batch(backend))
                raise KeyError
            with pytest.raises(MemoryStateError):
                model(_batch(backend))


def _batch(backend: Backend) -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * 1024, device=backend.device()).view(8, 1024)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    optimizer.zero_grad()
    model(_batch(backend)).square().sum().backward()
    optimizer.step()


def _trained(backend: Backend) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256)).to(backend.device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    _step(model, optimizer, backend)
    return model, optimizer
