"""Where a store listens, and the errors of one that cannot be served."""

import socket
from pathlib import Path

import pytest

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.errors import CommError

_LISTENS = "0A"


def _listening_at(port: int) -> list[str]:
    """Return the local addresses on which this machine listens at ``port``, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].rpartition(":") for row in rows if row[3] == _LISTENS]
    return [address for address, _, local_port in ends if int(local_port, 16) == port]


def test_a_store_listens_on_its_host_only() -> None:
    store = serve_store()
    assert store_address(store) == f"127.0.0.1:{store.port}"
    assert _listening_at(store.port) == ["0100007F"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 1.0)
    other = serve_store("127.0.0.2", store.port)  # the port is free on every other address
    connect_store(store_address(store)).set("key", "mine")
    connect_store(store_address(other)).set("key", "its")
    assert (store.get("key"), other.get("key")) == (b"mine", b"its")


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_a_host_name_and_an_ipv6_address_serve(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").read_text().startswith("0" * 31 + "1"):
        pytest.skip("this machine has no IPv6 loopback")
    store = serve_store(host)
    assert len(_listening_at(store.port)) == 1
    connect_store(store_address(store)).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(CommError, match=f"cannot serve a store on {host}:0[\\s\\S]*an address of this machine"):
        serve_store(host)


@pytest.mark.parametrize("port", [-1, 70000])
def test_an_impossible_port_is_refused(port: int) -> None:
    with pytest.raises(CommError, match=f"cannot serve a store on 127.0.0.1:{port}"):
        serve_store("127.0.0.1", port)
    with pytest.raises(CommError, match="no store address"):
        connect_store(f"127.0.0.1:{port}")


def test_a_taken_port_is_named() -> None:
    taken = serve_store()
    with pytest.raises(CommError, match=r"cannot serve a store[\s\S]*in use"):
        serve_store("127.0.0.1", taken.port)
