"""Whether a standalone group is made is one decision for all of its ranks."""

import gc
from functools import partial

import pytest

from hwrl.comm import Comm, Group, Store, await_keys, call_off_group, connect_store, serve_store, store_address
from hwrl.errors import CommAbortedError, CommError, CommTimeoutError, PeerLostError
from hwrl_cpu import INFO, CpuBackend
from tests.support.weight_link import beside


def _make(store: Store, rank: int, *, timeout_s: float = 600.0) -> Group:
    return Comm(CpuBackend(INFO)).standalone_group(store, rank=rank, size=2, name="g", timeout_s=timeout_s)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_comes_to_a_group_called_off_does_not_wait_for_the_ranks_that_have_gone(first: int) -> None:
    store = serve_store()
    making = beside(lambda: _make(store, first))
    assert not await_keys(connect_store(store_address(store)), [f"group/g/in/{first}"], timeout_s=200.0)
    call_off_group(connect_store(store_address(store)), name="g")
    for make in (making, beside(lambda: _make(store, 1 - first))):
        with pytest.raises(CommAbortedError, match="a peer called it off"):
            make()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_comes_too_late_to_a_group_is_told_so_at_once(first: int) -> None:
    store = serve_store()
    for rank, timeout_s in ((first, 0.1), (1 - first, 60.0)):
        with pytest.raises(CommTimeoutError, match=f"of 2 ranks, these did not come .*: {1 - first}\n"):
            beside(partial(_make, store, rank, timeout_s=timeout_s))()


@pytest.mark.parametrize("junk", [b"missing x", b"missing", b"missing 1,,2", b"made", b"made ", b"foo", b"\xff"])
def test_a_decision_that_no_rank_writes_is_an_error(junk: bytes) -> None:
    store = serve_store()
    store.set("group/g/decision", junk)  # type: ignore[arg-type]  # torch takes bytes, too
    with pytest.raises(CommError, match="which no rank writes"):
        _make(store, 1, timeout_s=300.0)


def test_a_group_that_is_made_cannot_be_called_off() -> None:
    store = serve_store()
    with Comm(CpuBackend(INFO)).standalone_group(store, rank=0, size=1, name="g", timeout_s=200.0) as group:
        call_off_group(store, name="g")
        group.barrier()


def test_a_group_on_a_lost_store_is_a_lost_peer() -> None:
    server = serve_store()
    client = connect_store(store_address(server))
    del server
    gc.collect()
    with pytest.raises(PeerLostError, match="the store has ended"):
        _make(client, 0, timeout_s=300.0)


def test_ranks_that_meet_again_on_a_lost_store_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_OPEN_STORE", "1")  # else the kernel ignores the refusal of a write: it is not signed
    server = serve_store()
    client = connect_store(store_address(server))
    group = Comm(CpuBackend(INFO)).standalone_group(client, rank=0, size=1, name="g", timeout_s=200.0)
    del server
    gc.collect()
    for meet in (group.warm_up, partial(group.rebuild, survivors=[0])):
        with pytest.raises(PeerLostError, match="the store cannot be reached"):
            meet(timeout_s=300.0)
