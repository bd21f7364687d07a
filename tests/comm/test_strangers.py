"""What a process without a store's key can do to the store: nothing. Each attack works on torch's own store."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hwrl.comm import Comm, connect_store, serve_store, signed, store_address
from hwrl.comm.signed import KeyedAddress, dial, require_key
from hwrl.errors import CommError, CommTimeoutError
from hwrl_cpu import INFO, CpuBackend
from tests.support.listeners import listeners
from tests.support.stranger import as_stranger


def _request(key: str, value: str) -> bytes:
    """Return what torch's client sends: its magic number, and the request to set a key."""
    texts = b"".join(struct.pack("<Q", len(text)) + text.encode() for text in (f"/{key}", value))
    return b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + texts


def _hear(place: tuple[str, int]) -> int:
    """Connect to ``place`` and send torch's request; return how many bytes it says."""
    heard = 0
    with contextlib.suppress(OSError), socket.create_connection(place, 0.1) as connection:
        connection.sendall(_request("key", "a stranger's"))
        while said := connection.recv(1000):
            heard += len(said)
    return heard


def test_another_user_neither_reads_nor_writes() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # not in the stubs
    before = listeners()
    store = serve_store()
    places = sorted(listeners() - before)
    assert len(places) >= 2, "the store, and the place inside this process"
    heard = as_stranger(lambda: [_hear(place) for place in [("127.0.0.1", torchs.port), *places]])
    assert torchs.get("key") == b"a stranger's", "the attack works on torch's own store"
    assert set(heard[1:]) == {0}, "a stranger is told nothing"
    assert not store.check(["key"])
    connect_store(store_address(store)).set("key", "the run's")
    assert store.get("key") == b"the run's"


def test_a_process_of_another_run_is_refused() -> None:
    store, other = serve_store(), serve_store()
    place, key = store_address(store).split("#")[0], store_address(other).split("#")[1]
    with pytest.raises(CommTimeoutError, match=rf"no store answers at {place}[\s\S]*it has another key") as refused:
        connect_store(f"{place}#{key}", timeout_s=0.2)
    assert key not in str(refused.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:1#", "#key", "127.0.0.1#key"])
def test_an_address_without_a_key_or_a_port_is_none(address: str) -> None:
    with pytest.raises(CommError, match="no store address") as refused:
        connect_store(address)
    assert "key'" not in str(refused.value)


def test_who_took_the_stores_place_hears_nothing() -> None:
    key = secrets.token_urlsafe(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)
        with pytest.raises(CommTimeoutError, match="does not know the key"):
            connect_store(f"127.0.0.1:{listener.getsockname()[1]}#{key}", timeout_s=0.2)
        with listener.accept()[0] as probe:
            assert probe.recv(1000) == b"", "only the probe without a key arrived, and it says nothing"
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_member_without_the_key_cannot_speak_for_another() -> None:
    """A connection is signed to its end: packets on it from elsewhere, such as a reset, change nothing."""
    store = serve_store()
    joined = connect_store(store_address(store))
    address = KeyedAddress.parse(store_address(store))
    for key in ("", "another", address.key[:-1]):
        with socket.socket() as stranger:
            if key:
                require_key(stranger, key)
            stranger.settimeout(0.05)
            with pytest.raises(TimeoutError):
                stranger.connect((address.host, address.port))
    joined.set("key", "value")
    assert store.get("key") == b"value"


def test_strangers_in_a_crowd_do_not_keep_a_process_out() -> None:
    store = serve_store()
    address = KeyedAddress.parse(store_address(store))
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            stranger = opened.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex((address.host, address.port))
        begin = time.monotonic()
        connect_store(store_address(store)).set("key", "value")
        assert time.monotonic() - begin < 5.0
    assert store.get("key") == b"value"


def test_a_crowd_of_members_joins_at_once() -> None:
    store = serve_store()
    address = KeyedAddress.parse(store_address(store))
    with ThreadPoolExecutor(100) as threads:
        members = list(threads.map(lambda _: dial(address, timeout_s=10.0), range(300)))
    for member in members:
        member.close()
    assert len(members) == 300


def test_a_kernel_without_signatures_is_an_error_unless_the_user_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    signed._why_open.cache_clear()
    monkeypatch.setattr(signed, "_TCP_MD5SIG_EXT", 250)
    try:
        with pytest.raises(CommError, match=r"closed to strangers[\s\S]*HWRL_OPEN_STORE=1"):
            serve_store()
        monkeypatch.setenv("HWRL_OPEN_STORE", "1")
        store = serve_store()
        connect_store(store_address(store)).set("key", "value")
        assert store.get("key") == b"value"
    finally:
        signed._why_open.cache_clear()


def test_a_served_store_is_met_by_a_process_that_waits_for_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = KeyedAddress("127.0.0.1", port, "the run's")
    with ThreadPoolExecutor(1) as threads, socket.socket() as late:
        early = threads.submit(dial, address, timeout_s=10.0)
        late.bind(("127.0.0.1", port))
        require_key(late, address.key)
        late.listen()
        early.result().close()


def test_a_group_that_meets_on_the_loopback_interface_listens_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = connect_store(store_address(serve := serve_store()))
    before = listeners()
    with Comm(CpuBackend(INFO)).standalone_group(store, rank=0, size=1, name="alone"):
        new = listeners() - before
    assert new and {host for host, _ in new} == {"127.0.0.1"}
    del serve
