"""The promises of PinnedPool and of the fingerprint that tells whether device memory changed."""

import torch

from hwrl.memory import PinnedPool
from hwrl.memory.fingerprint import fingerprints
from hwrl_cpu import INFO, CpuBackend


def test_a_slab_is_reused_and_counted_once() -> None:
    with PinnedPool(CpuBackend(INFO)) as pool:
        slab = pool.slab("a", nbytes=4096)
        assert pool.slab("a", nbytes=4096) is slab
        assert pool.slab("a", nbytes=1) is slab
        pool.slab("b", nbytes=100)
        assert pool.nbytes == 4196


def test_a_larger_slab_replaces_the_smaller_one() -> None:
    with PinnedPool(CpuBackend(INFO)) as pool:
        pool.slab("a", nbytes=10)
        assert pool.slab("a", nbytes=20).numel() == 20
        assert pool.nbytes == 20


def test_leaving_the_context_frees_the_slabs() -> None:
    with PinnedPool(CpuBackend(INFO)) as pool:
        pool.slab("a", nbytes=10)
    assert pool.nbytes == 0


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
