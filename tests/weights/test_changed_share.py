"""How much of a version differs from the one before, and the one warning about a version that changed nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.testing.processes import run_processes
from hwrl.weights import NamedTensor, PolicySender, WeightReceiver, WeightSender, WeightSource
from hwrl_cpu import INFO, CpuBackend
from tests.support.sharded_weights import TrainerSide, sharded
from tests.support.weight_link import beside, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture
_BUCKET_NBYTES = 1 << 16
_SAME_BITS = "version 2 of 'policy' has the same bits as version 1"


def _weights(seeds: Iterable[int]) -> list[NamedTensor]:
    """Return a tensor for each seed, of an odd size: so there are gaps between them in a bucket of the ring."""
    made = [(f"w{n}", torch.randn(3001, generator=torch.Generator().manual_seed(seed))) for n, seed in enumerate(seeds)]
    return [*made, ("scalar", torch.tensor(1.0))]


def _shares(sender: WeightSender, receiver: WeightReceiver, versions: list[Any]) -> list[float | None]:
    sender.wait_for_receivers(1)
    shares = []
    for number, weights in enumerate(versions, 1):
        receiving = beside(receiver.receive)
        shares.append(sender.publish(number, weights).changed_share)
        receiving()
    return shares


_FIRST, _ONE_CHANGED, _ALL_CHANGED = _weights(range(40)), _weights([99, *range(1, 40)]), _weights(range(100, 140))
_VERSIONS = [_FIRST, _FIRST, _ONE_CHANGED, _ALL_CHANGED, _ALL_CHANGED]


def _ipc_shares(rank: int, address: str) -> list[float | None] | None:
    options: dict[str, Any] = {"backend": CpuBackend(INFO)}
    store = connect_store(address)
    if rank == 1:
        with WeightReceiver(store, replica="r0", **options) as receiver:
            for _ in _VERSIONS:
                receiver.receive()
        return None
    with WeightSender(store, transport="ipc", bucket_nbytes=_BUCKET_NBYTES, buckets=2, **options) as sender:
        sender.wait_for_receivers(1)
        return [sender.publish(number, weights).changed_share for number, weights in enumerate(_VERSIONS, 1)]


@pytest.mark.parametrize("transport", ["device", "host", "ipc"])
def test_a_report_has_the_share_that_changed(store: Store, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    if transport == "ipc":
        shares = run_processes(_ipc_shares, 2, store_address(store))[0]
    else:
        with (
            sender_of(store, transport=transport, bucket_nbytes=_BUCKET_NBYTES, buckets=2) as sender,
            receiver_of(store) as receiver,
        ):
            shares = _shares(sender, receiver, _VERSIONS)
        assert caplog.text.count("has the same bits") == 1 and _SAME_BITS in caplog.text
    assert shares[:2] == [1.0, 0.0] and shares[3:] == [1.0, 0.0]
    assert shares[2] is not None and 0.0 < shares[2] < 0.2


@pytest.mark.parametrize("transport", ["device", "host"])
def test_iterators_are_compared_from_the_first_on(store: Store, transport: str) -> None:
    with (
        sender_of(store, transport=transport, bucket_nbytes=_BUCKET_NBYTES, buckets=2) as sender,
        receiver_of(store) as receiver,
    ):
        shares = _shares(sender, receiver, [iter(_FIRST), iter(_FIRST), iter(_FIRST), iter(_ALL_CHANGED)])
    assert shares == [1.0, 0.0, 0.0, 1.0]


def test_what_nobody_received_is_not_compared_and_what_is_sent_again_is_not_warned_of(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with sender_of(store) as sender:
        assert sender.publish(1, _FIRST).changed_share is None
        with receiver_of(store, "r0") as first:
            receiving = beside(first.receive)
            assert sender.publish(1, _FIRST).changed_share == 1.0
            receiving()
            with receiver_of(store, "r1") as second:
                receiving = beside(second.receive)
                assert sender.publish(1, _FIRST).changed_share == 1.0, "the same version, to the new receiver"
                receiving()
                assert "same bits" not in caplog.text
                both = [beside(one.receive) for one in (first, second)]
                assert sender.publish(1, _FIRST, again=True).changed_share == 0.0
                assert [one().version for one in both] == [1, 1] and "same bits" in caplog.text


def test_an_adapter_that_never_changes_is_warned_of(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    model, adapter = (WeightSource.of(_weights(seeds)) for seeds in ([1], [2]))
    policy = PolicySender(lambda name: sender_of(store, name=name, transport="host"), base=7)
    shares = [policy.send(version, model=model, adapter=adapter).policy.changed_share for version in (1, 2)]
    policy.close()
    assert shares == [1.0, 0.0] and _SAME_BITS in caplog.text


def _send_or_receive(rank: int, address: str) -> list[float | None] | None:
    logging.disable()
    if rank == 3:
        with WeightReceiver(connect_store(address), replica="r0", backend=CpuBackend(INFO)) as receiver:
            for _ in range(4):
                receiver.receive()
        return None
    with TrainerSide(address, rank, 3, 2) as side:
        side.sender.wait_for_receivers(1, timeout_s=600.0)
        reports = [side.send(number, sharded(side.group, seed)) for number, seed in enumerate((1, 1, 2, 2), 1)]
        return [report.changed_share for report in reports] if rank == 0 else None


def test_the_shares_of_several_senders_are_added_up() -> None:
    store = serve_store()
    first, same, changed, still = run_processes(_send_or_receive, 4, store_address(store))[0]
    assert (first, same, still) == (1.0, 0.0, 0.0)
    assert changed > 0.5, "all but the empty and constant tensors"
