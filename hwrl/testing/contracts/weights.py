"""What a backend promises about weights on their way from a trainer to a rollout, in two real processes."""

from __future__ import annotations

import pytest
import torch

from hwrl.backend import Backend
from hwrl.comm import connect_store
from hwrl.testing.contracts.pair import StoreAddress, need_two_ranks, place
from hwrl.testing.processes import run_processes
from hwrl.weights import WeightReceiver, WeightSender
from hwrl.weights.sender import Transport

_VERSIONS = (1, 2, 3)
_SLAB_NBYTES = 1 << 16


class WeightsContract:
    """Every version arrives whole and bit for bit, over each transport."""

    @pytest.mark.parametrize("transport", ["device", "host"])
    def test_weights_arrive_bit_for_bit(self, backend: Backend, transport: Transport) -> None:
        """Scalars, odd sizes, mixed dtypes, strided and tied tensors, and one larger than a slab."""
        if transport == "device":
            need_two_ranks(backend)
        address = StoreAddress()
        sent, received = run_processes(_send_or_receive, 2, backend.info.name, str(address), transport)
        assert sent == list(_VERSIONS)
        assert received == {version: [] for version in _VERSIONS}


def _send_or_receive(rank: int, name: str, address: str, transport: Transport) -> object:
    return _send(name, address, transport) if rank == 0 else _receive(name, address)


def _send(name: str, address: str, transport: Transport) -> list[int]:
    backend, store = place(0, name), connect_store(address)
    with WeightSender(store, backend=backend, transport=transport, slab_nbytes=_SLAB_NBYTES) as sender:
        sender.wait_for_receivers(1)
        sent = []
        for version in _VERSIONS:
            sent.append(sender.publish(version, _weights(backend, version).items()).version)
            store.wait([f"took/{version}"])
        return sent


def _receive(name: str, address: str) -> dict[int, list[str]]:
    """Return for each version the names of the tensors that are not what was sent."""
    backend, store = place(1, name), connect_store(address)
    wrong = {}
    with WeightReceiver(store, replica="conformance", backend=backend) as receiver:
        for _ in _VERSIONS:
            got = receiver.receive()
            wanted = _weights(backend, got.version)
            wrong[got.version] = [key for key in wanted if not _same(got[key], wanted[key])]
            store.set(f"took/{got.version}", "yes")
    return wrong


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(got, wanted)


def _weights(backend: Backend, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    device = backend.device()

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    embedding = normal(257, 96, dtype=torch.bfloat16)
    return {
        "embedding": embedding,
        "norm": normal(97, dtype=torch.float32),
        "scale": normal(dtype=torch.float32),
        "strided": normal(64, 33, dtype=torch.float16).t(),
        "larger than a slab": normal(3 * _SLAB_NBYTES // 4 + 1, dtype=torch.float32),
        "counts": torch.arange(5, device=device) + version,
        "mask": torch.tensor([True, False, True], device=device),
        "head": embedding,
    }
