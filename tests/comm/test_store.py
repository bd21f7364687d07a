"""Where a store listens, and the errors of one that cannot be served."""

import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import Comm, PrefixStore, Store, clone_store, connect_store, serve_store, store_address
from hwrl.comm.signed import Dialer, why_unsigned
from hwrl.errors import CommError
from hwrl.weights import WeightSender
from hwrl_cpu import INFO, CpuBackend
from tests.support.listeners import listeners


def _place_of(store: Store) -> tuple[str, int]:
    """Return the host and the port where processes join ``store``."""
    host, _, port = store_address(store).partition("#")[0].rpartition(":")
    return host, int(port)


def test_a_store_listens_on_its_host_only() -> None:
    before = listeners()
    store = serve_store()
    host, port = _place_of(store)
    assert host == "127.0.0.1"
    new = {address for address, _ in listeners() - before}
    assert new <= {"127.0.0.1", "127.0.0.2"}, "the store, and the place inside this process: both on loopback"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", port), 1.0)
    other = serve_store("127.0.0.3", port)  # the port is free on every other address
    connect_store(store_address(store)).set("key", "mine")
    connect_store(store_address(other)).set("key", "its")
    assert (store.get("key"), other.get("key")) == (b"mine", b"its")


def test_a_connection_that_is_taken_back_at_the_last_moment_does_not_end_the_dialer() -> None:
    """``Dialer.make`` may close a connection that it dialed just when the dialer's thread is about to take it."""
    taken: list[Any] = []

    def trace(frame: Any, *_: Any) -> Any:
        if frame.f_code is not Dialer._connect.__code__:
            return None
        dialed = frame.f_locals["self"].__dict__["_dialed"]
        while dialed and frame.f_lineno > frame.f_code.co_firstlineno and not taken:
            taken.append(dialed.popleft())
        return trace

    store = serve_store()
    threading.settrace(trace)
    try:
        other = serve_store()
        joined = clone_store(other)
    finally:
        threading.settrace(None)
    for number in range(2):
        clone_store(joined).set(f"key {number}", "value")
    assert other.check(["key 0", "key 1"]) and taken
    taken[0].close()
    store.set("key", "value")


@pytest.mark.parametrize("host", ["localhost", "::1", "0.0.0.0"])
def test_other_kinds_of_hosts_serve(host: str) -> None:
    if host == "0.0.0.0" and (why := why_unsigned()) is not None:
        pytest.skip(why)
    if host == "::1" and not Path("/proc/net/if_inet6").read_text().startswith("0" * 31 + "1"):
        pytest.skip("this machine has no IPv6 loopback")
    store = serve_store(host)
    assert not store_address(store).startswith("0.0.0.0"), "elsewhere, this would be the other machine"
    connect_store(store_address(store)).set("key", "value")
    assert store.get("key") == b"value"


def test_a_served_store_frees_its_ports() -> None:
    store = serve_store()
    port = _place_of(store)[1]
    del store
    again = serve_store(port=port)
    assert _place_of(again)[1] == port


def test_a_store_lives_as_long_as_what_was_made_of_it() -> None:
    sender = WeightSender(serve_store(), transport="host")
    group: Any = Comm(CpuBackend(INFO)).standalone_group(serve_store(), rank=0, size=1, name="alone")
    stores: list[Store] = [PrefixStore("part", serve_store()), clone_store(serve_store()), group.store]
    gc.collect()
    assert sender.publish(1, {"w": torch.ones(3)}).receivers == 0
    for store in stores:
        clone_store(store).set("key", "value")
        assert store.get("key") == b"value"
    group.close()
    sender.close()


def test_the_address_of_a_store_that_was_dropped_is_named_at_once() -> None:
    address = store_address(serve_store())
    gc.collect()
    with pytest.raises(CommError, match=r"has ended[\s\S]*dropped the object that serve_store returned"):
        connect_store(address)


@pytest.mark.parametrize(
    "use",
    [store_address, clone_store, WeightSender, lambda store: PrefixStore("p", store)],
    ids=["address", "clone", "sender", "prefix"],
)
def test_a_fork_of_the_server_is_told_what_it_may_do(use: Callable[[Any], object]) -> None:
    store = serve_store()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use(store)
        except CommError as exc:
            os.write(write, str(exc).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, "rb") as said:
        assert "then forked this one" in said.read().decode()
    store.set("key", "value")
    assert store.get("key") == b"value", "the parent's connection was not touched"


def test_a_fork_of_the_server_can_join() -> None:
    store = serve_store()
    address = store_address(store)
    child = os.fork()
    if child == 0:
        try:
            connect_store(address).set("child", "here")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert connect_store(address).get("child") == b"here"


def test_every_kind_of_client_reads_what_another_wrote() -> None:
    store = serve_store()
    joined = connect_store(store_address(store))
    clients = [store, joined, clone_store(joined), joined.clone()]  # type: ignore[attr-defined]  # missing in stubs
    for number, client in enumerate(clients):
        client.set(f"key {number}", bytes(100_000))
    for client in clients:
        assert [len(client.get(f"key {number}")) for number in range(len(clients))] == [100_000] * len(clients)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(CommError, match=f"cannot serve a store on {host}:0[\\s\\S]*an address of this machine"):
        serve_store(host)


@pytest.mark.parametrize("port", [-1, 70000])
def test_an_impossible_port_is_refused(port: int) -> None:
    with pytest.raises(CommError, match=f"cannot serve a store on 127.0.0.1:{port}"):
        serve_store("127.0.0.1", port)
    with pytest.raises(CommError, match="no store address"):
        connect_store(f"127.0.0.1:{port}#key")


def test_a_taken_port_is_named() -> None:
    taken = serve_store()
    with pytest.raises(CommError, match=r"cannot serve a store[\s\S]*in use"):
        serve_store("127.0.0.1", _place_of(taken)[1])
