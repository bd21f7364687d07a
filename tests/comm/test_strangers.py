"""What a process without a store's key can do to the store: nothing. Each attack works on torch's own store."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.comm.door import Door, Peer
from hwrl.comm.gate import GateAddress, dial
from hwrl.errors import CommError
from hwrl.testing import run_processes

_NOBODY = 65534
_LISTENS = "0A"
_NONCE_NBYTES, _ANSWER_NBYTES = 32, 66


def _listening() -> set[tuple[str, int]]:
    """Return the IPv4 addresses and ports where this machine listens: any user can read them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == _LISTENS]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in ends}


def _become_a_stranger() -> None:
    "a host".encode("idna")  # Python's own files may be closed to the stranger: load this one now
    if os.geteuid() == 0:
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def _request(key: str, value: str) -> bytes:
    """Return what torch's client sends: its magic number, and the request to set a key."""
    texts = b"".join(struct.pack("<Q", len(text)) + text.encode() for text in (f"/{key}", value))
    return b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + texts


def _hear(place: tuple[str, int]) -> int:
    """Connect to ``place`` and send torch's request; return how many bytes it says."""
    heard = 0
    with contextlib.suppress(OSError), socket.create_connection(place, 0.5) as connection:
        connection.sendall(_request("key", "a stranger's"))
        while said := connection.recv(1000):
            heard += len(said)
    return heard


def _attack(rank: int, places: list[tuple[str, int]]) -> list[int]:
    _become_a_stranger()
    return [_hear(place) for place in places]


def test_another_user_neither_reads_nor_writes() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # not in the stubs
    before = _listening()
    store = serve_store()
    places = sorted(_listening() - before)
    assert len(places) >= 3, "the gate, the store, and the place inside this process"
    (heard,) = run_processes(_attack, 1, [("127.0.0.1", torchs.port), *places])
    assert torchs.get("key") == b"a stranger's", "the attack works on a store without a gate"
    assert set(heard[1:]) == {0, _NONCE_NBYTES}, "the gate says random bytes, the other places nothing"
    assert not store.check(["key"])
    connect_store(store_address(store)).set("key", "the run's")
    assert store.get("key") == b"the run's"


def test_a_process_of_another_run_is_refused() -> None:
    store, other = serve_store(), serve_store()
    place, key = store_address(store).split("#")[0], store_address(other).split("#")[1]
    with pytest.raises(CommError, match=f"the store at {place} does not admit this process") as refused:
        connect_store(f"{place}#{key}")
    assert key not in str(refused.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:1#", "#key", "127.0.0.1#key"])
def test_an_address_without_a_key_or_a_port_is_none(address: str) -> None:
    with pytest.raises(CommError, match="no store address") as refused:
        connect_store(address)
    assert "key'" not in str(refused.value)


@contextlib.contextmanager
def _listener(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(20.0)
        yield listener


def test_who_took_the_gates_place_learns_nothing_and_is_refused() -> None:
    key, got = secrets.token_urlsafe(32), bytearray()

    def pretend(listener: socket.socket) -> None:
        listener.accept()[0].close()  # connect_store looks whether there is a server
        with listener.accept()[0] as connection:
            connection.sendall(bytes(_NONCE_NBYTES))
            while len(got) < _ANSWER_NBYTES:
                got.extend(connection.recv(1000))
            connection.sendall(secrets.token_bytes(34))

    with _listener() as listener:
        thread = threading.Thread(target=pretend, args=[listener])
        thread.start()
        with pytest.raises(CommError, match="does not know the key"):
            connect_store(f"127.0.0.1:{listener.getsockname()[1]}#{key}")
        thread.join()
    assert len(got) == _ANSWER_NBYTES
    assert key.encode() not in bytes(got)


def test_a_proof_passed_on_by_another_host_or_sent_again_is_refused() -> None:
    store = serve_store()
    place, key = store_address(store).split("#")
    gate = ("127.0.0.1", int(place.rpartition(":")[2]))
    recorded, said = bytearray(), bytearray()

    def pass_on(listener: socket.socket) -> None:
        listener.accept()[0].close()
        with listener.accept()[0] as client, socket.create_connection(gate, 20.0) as real:
            client.sendall(real.recv(_NONCE_NBYTES))
            while len(recorded) < _ANSWER_NBYTES:
                recorded.extend(client.recv(1000))
            real.sendall(recorded)
            said.extend(real.recv(1000))

    with _listener("127.0.0.9") as listener:
        thread = threading.Thread(target=pass_on, args=[listener])
        thread.start()
        with pytest.raises(CommError, match="does not admit this process"):
            connect_store(f"127.0.0.9:{listener.getsockname()[1]}#{key}")
        thread.join()
    assert said == b"", "the proof was for another host"
    with socket.create_connection(gate, 20.0) as again:
        assert len(again.recv(1000)) == _NONCE_NBYTES
        again.sendall(recorded)
        assert again.recv(1000) == b""


def test_idle_strangers_do_not_keep_a_process_out() -> None:
    store = serve_store()
    place = store_address(store).split("#")[0]
    with contextlib.ExitStack() as opened:
        port = int(place.rpartition(":")[2])
        idle = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 5.0)) for _ in range(300)]
        begin = time.monotonic()
        connect_store(store_address(store)).set("key", "value")
        assert time.monotonic() - begin < 5.0
        assert len(idle[0].recv(1000)) == _NONCE_NBYTES
        assert idle[0].recv(1000) == b"", "the oldest ones are dropped"
    assert store.get("key") == b"value"


def test_a_crowd_of_members_joins_at_once() -> None:
    store = serve_store()
    address = GateAddress.parse(store_address(store))
    with ThreadPoolExecutor(100) as threads:
        members = list(threads.map(lambda _: dial(address), range(300)))
    for member in members:
        member.close()
    assert len(members) == 300


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_door_admits_one_peer_only(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener, contextlib.ExitStack() as opened:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        door = Door(listener)
        listener.listen()

        def client() -> socket.socket:
            made = opened.enter_context(socket.socket(family))
            made.bind((host, 0))
            made.settimeout(0.1)
            return made

        guest, stranger = client(), client()
        with door.admitting(Peer(host, 1)), door.admitting(Peer(*guest.getsockname()[:2])):
            with pytest.raises(TimeoutError):
                stranger.connect(listener.getsockname())
            guest.connect(listener.getsockname())
            inside, _ = listener.accept()
        with inside:
            guest.sendall(b"still connected")
            assert inside.recv(100) == b"still connected"
        with pytest.raises(TimeoutError):
            client().connect(listener.getsockname())
