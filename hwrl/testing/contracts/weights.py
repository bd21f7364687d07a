"""The contract of weight transfers from a trainer to a rollout, in two real processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch

from hwrl.comm import PrefixStore, Store, connect_store, raw_bytes
from hwrl.interfaces import Backend, Capability
from hwrl.testing.contracts.need import need, need_two_ranks
from hwrl.testing.contracts.pair import StoreAddress, backend_of_rank
from hwrl.testing.levels import Level
from hwrl.testing.limits import scaled
from hwrl.testing.processes import run_processes
from hwrl.testing.subject import Subject
from hwrl.weights import TRANSPORTS, WeightReceiver, WeightSender, with_transport

_VERSIONS = (1, 2, 3)
_PLACES = ("apart", "in place")
_BUCKET_NBYTES = 1 << 16


class TransportContract:
    """Every version arrives complete and bit for bit, in another process."""

    level: ClassVar[Level] = Level.COLLECTIVES

    @pytest.fixture
    def transport(self, subject: Subject) -> str:
        """The name of the transport."""
        return subject.name

    def test_weights_arrive_bit_for_bit(self, backend: Backend, transport: str) -> None:
        """Scalars, odd sizes, mixed dtypes, every NaN, strided and tied tensors, and one larger than a bucket.

        Once they arrive in new memory of the receiver, once in tensors given to it.
        """
        need_transport(backend, transport)
        address = StoreAddress()
        sent, received = run_processes(_send_or_receive, 2, backend.info.name, str(address), transport)
        assert sent == {place: list(_VERSIONS) for place in _PLACES}
        assert received == {place: {version: [] for version in _VERSIONS} for place in _PLACES}


class WeightsContract(TransportContract):
    """The backend carries each built-in transport."""

    level = Level.ROLLOUT

    @pytest.fixture(params=list(TRANSPORTS))
    def transport(self, request: pytest.FixtureRequest) -> str:
        """The name of the transport."""
        return str(request.param)


def need_transport(backend: Backend, transport: str) -> None:
    """Skip the test if the backend lacks what ``transport`` needs."""
    facts = with_transport(transport)[transport]
    if facts.forms_groups:
        need_two_ranks(backend)
    if facts.lends_device_memory:
        need(backend, Capability.DEVICE_IPC)


def _send_or_receive(rank: int, name: str, address: str, transport: str) -> object:
    backend, store = backend_of_rank(rank, name), connect_store(address)
    if rank == 0:
        return {link: _send(backend, PrefixStore(link, store), transport) for link in _PLACES}
    return {link: _receive(backend, PrefixStore(link, store), link, transport) for link in _PLACES}


def _send(backend: Backend, store: Store, transport: str) -> list[int]:
    options: dict[str, Any] = {"backend": backend, "transport": transport, "transports": with_transport(transport)}
    with WeightSender(store, bucket_nbytes=_BUCKET_NBYTES, **options) as sender:
        sender.wait_for_receivers(1)
        sent = []
        for version in _VERSIONS:
            sent.append(sender.publish(version, _weights(backend, version).items()).version)
            store.wait([f"took/{version}"], timedelta(seconds=scaled(300.0)))
        return sent


def _receive(backend: Backend, store: Store, link: str, transport: str) -> dict[int, list[str]]:
    """Return for each version the names of tensors with wrong values."""
    wrong = {}
    given = {key: torch.zeros_like(tensor).contiguous() for key, tensor in _weights(backend, 0).items()}
    into = given if link == "in place" else None
    transports = with_transport(transport)
    with WeightReceiver(store, replica="kit", backend=backend, into=into, transports=transports) as receiver:
        for _ in _VERSIONS:
            got = receiver.receive()
            wanted = _weights(backend, got.version)
            wrong[got.version] = [key for key in wanted if not _same(got[key], wanted[key])]
            store.set(f"took/{got.version}", "yes")
    return wrong


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(raw_bytes(got.contiguous()), raw_bytes(wanted.contiguous()))


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
        "larger than a bucket": normal(3 * _BUCKET_NBYTES // 4 + 1, dtype=torch.float32),
        "every bit pattern": torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(torch.bfloat16),
        "counts": torch.arange(5, device=device) + version,
        "mask": torch.tensor([True, False, True], device=device),
        "head": embedding,
    }
