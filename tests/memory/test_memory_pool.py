"""The promises of PinnedPool and of the fingerprint that tells whether device memory changed."""

import weakref
from collections.abc import Callable

import torch

from hwrl.errors import UnsupportedError
from hwrl.interfaces import Capability, Support
from hwrl.memory import Offloader, PinnedPool
from hwrl.memory.fingerprint import fingerprints
from hwrl_cpu import INFO, CpuBackend


def test_a_slab_is_reused_and_counted_once() -> None:
    with PinnedPool(CpuBackend(INFO)) as pool:
        slab = pool.slab("a", nbytes=4096)
        assert pool.slab("a", nbytes=4096) is slab
        assert pool.slab("a", nbytes=1) is slab
        pool.slab("b", nbytes=100)
        assert pool.nbytes == 4196


class Locking(CpuBackend):
    """Counts what is page-locked; without ``able`` it is a device that cannot lock what exists already."""

    def __init__(self, *, able: bool = True) -> None:
        super().__init__(INFO)
        self.able, self.locked_nbytes = able, 0

    def register_host_memory(self, memory: torch.Tensor) -> None:
        if not self.able:
            raise UnsupportedError("cannot page-lock", why="the test says so", fix="ask the test")
        self.locked_nbytes += memory.nbytes

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        self.locked_nbytes -= memory.nbytes


def test_exactly_what_is_held_is_page_locked_and_no_longer_than_the_pool_lives() -> None:
    backend = Locking()
    with PinnedPool(backend) as pool:
        pool.slab("a", nbytes=5000)
        pool.slab("a", nbytes=7001)
        pool.slab("none", nbytes=0)
        assert backend.locked_nbytes == pool.nbytes == 7001
    assert backend.locked_nbytes == 0
    forgotten = PinnedPool(backend)
    slab = forgotten.slab("a", nbytes=100)
    del forgotten
    assert backend.locked_nbytes == 0
    slab.fill_(1)


class OneSlab(CpuBackend):
    """A host with room for one slab: it refuses another one while the first exists."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self._slab: Callable[[], torch.Tensor | None] = lambda: None

    def register_host_memory(self, memory: torch.Tensor) -> None:
        if self._slab() is not None:
            raise MemoryError
        self._slab = weakref.ref(memory)

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        pass


def test_a_host_without_room_for_two_slabs_can_replace_one_by_a_larger_one() -> None:
    model = torch.nn.Linear(8, 8)
    with Offloader(model, backend=OneSlab()) as offloader:
        offloader.offload(optimizer=False)
        offloader.load()
        model.register_buffer("late", torch.ones(4096))
        offloader.offload(optimizer=False)
        offloader.load()
    assert int(model.get_buffer("late").sum()) == 4096


def test_a_device_that_cannot_lock_what_exists_uses_its_own_pinned_memory() -> None:
    with PinnedPool(Locking(able=False)) as pool:
        assert int(pool.slab("a", nbytes=100).fill_(2).sum()) == 200


def _print(tensor: torch.Tensor) -> int:
    return fingerprints([tensor.untyped_storage()])[0]


def test_every_flipped_bit_and_swapped_row_changes_the_fingerprint() -> None:
    for nbytes in (1, 7, 4096, 8 * 1021, 8 * 1021 * 2 + 5):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
        before = _print(data)
        assert _print(data.clone()) == before
        for place in {0, nbytes // 2, nbytes - 1}:
            changed = data.clone()
            changed[place] ^= 1
            assert _print(changed) != before, f"byte {place} of {nbytes}"


def test_swapped_rows_and_a_changed_sign_change_the_fingerprint() -> None:
    matrix = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    swapped = matrix.clone()
    swapped[[3, 131]] = matrix[[131, 3]]
    assert len({_print(matrix), _print(swapped), _print(-matrix)}) == 3


class Unlocking(Locking):
    """A device for which no host memory can be page-locked."""

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.PINNED_MEMORY:
            return Support("unsupported", "the test says so")
        return super().supports(capability)

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        self.require(Capability.PINNED_MEMORY, needed_for="allocate")
        raise AssertionError("not reached")


def test_a_device_without_page_locked_memory_has_slabs_and_offloads_through_them() -> None:
    backend, model = Unlocking(able=False), torch.nn.Linear(8, 8)
    before = model.weight.detach().clone()
    with PinnedPool(backend) as pool:
        assert pool.slab("a", nbytes=10).numel() == 10
    with Offloader(model, backend=backend) as offloader:
        offloader.offload()
        assert model.weight.untyped_storage().nbytes() == 0
        offloader.load()
        assert torch.equal(model.weight, before)
