"""What a process without a store's key can do to the store: nothing. Each attack works on torch's own store."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hwrl.comm import Comm, PrefixStore, await_keys, connect_store, serve_store, signed, store_address
from hwrl.comm.signed import KeyedAddress, dial, require_key
from hwrl.errors import CommError, CommTimeoutError
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.listeners import listeners
from tests.support.speed import slow
from tests.support.stranger import become_a_stranger
from tests.support.weight_link import beside

signed_only = pytest.mark.skipif(signed.why_unsigned() is not None, reason="this kernel cannot sign packets")


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


def _hear_all(rank: int, places: list[tuple[str, int]]) -> list[int]:
    become_a_stranger()
    return [_hear(place) for place in places]


@signed_only
def test_another_user_neither_reads_nor_writes() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # not in the stubs
    before = listeners()
    store = serve_store()
    places = sorted(listeners() - before)
    assert len(places) >= 2, "the store, and the place inside this process"
    [heard] = run_processes(_hear_all, 1, [("127.0.0.1", torchs.port), *places])
    assert torchs.get("key") == b"a stranger's", "the attack works on torch's own store"
    assert set(heard[1:]) == {0}, "a stranger is told nothing"
    assert not store.check(["key"])
    connect_store(store_address(store)).set("key", "the run's")
    assert store.get("key") == b"the run's"


@signed_only
def test_a_process_of_another_run_is_refused() -> None:
    store, other = serve_store(), serve_store()
    place, key = store_address(store).split("#")[0], store_address(other).split("#")[1]
    with pytest.raises(CommTimeoutError, match=rf"no store answers at {place}[\s\S]*it has another key") as refused:
        connect_store(f"{place}#{key}", timeout_s=slow(0.2))
    assert key not in str(refused.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:1#", "#key", "127.0.0.1#key", "a..b:1#key"])
def test_an_address_without_a_key_a_port_or_a_host_is_none(address: str) -> None:
    with pytest.raises(CommError, match="no store address") as refused:
        connect_store(address)
    assert "key'" not in str(refused.value)


def test_a_system_without_the_options_for_lost_peers_has_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "TCP_USER_TIMEOUT", 200)  # a number that no kernel knows
    store = serve_store()
    dial(KeyedAddress.parse(store_address(store)), timeout_s=30).close()


def test_who_took_the_stores_place_hears_nothing() -> None:
    key = secrets.token_urlsafe(32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(300.0)
        with pytest.raises(CommTimeoutError, match="does not know the key"):
            connect_store(f"127.0.0.1:{listener.getsockname()[1]}#{key}", timeout_s=slow(0.2))
        with listener.accept()[0] as probe:
            assert probe.recv(1000) == b"", "only the probe without a key arrived, and it says nothing"
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()


@signed_only
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
        assert time.monotonic() - begin < slow(5.0)
    assert store.get("key") == b"value"


def test_a_crowd_of_members_joins_at_once() -> None:
    store = serve_store()
    address = KeyedAddress.parse(store_address(store))
    with ThreadPoolExecutor(100) as threads:
        members = list(threads.map(lambda _: dial(address, timeout_s=100.0), range(300)))
    for member in members:
        member.close()
    assert len(members) == 300


@pytest.mark.parametrize("accepted", [False, True])
def test_without_signatures_a_store_on_the_loopback_is_open_and_another_is_refused_unless_the_user_accepts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, accepted: bool
) -> None:
    signed.why_unsigned.cache_clear()
    signed.warn_once.cache_clear()
    monkeypatch.setattr(signed, "_TCP_MD5SIG_EXT", 250)
    try:
        if accepted:
            monkeypatch.setenv("HWRL_OPEN_STORE", "1")
            serve_store("0.0.0.0")
        else:
            with pytest.raises(CommError, match=r"0\.0\.0\.0 closed to strangers[\s\S]*HWRL_OPEN_STORE=1"):
                serve_store("0.0.0.0")
        store, _ = serve_store(), serve_store("127.0.0.3")
        text = "HWRL_OPEN_STORE=1: stores have no key" if accepted else "cannot sign packets"
        assert caplog.text.count(text) == 1
        told: list[str] = []
        serve_store(warn=told.append)
        assert len(told) == 1 and text in told[0]
        connect_store(store_address(store)).set("key", "value")
        assert store.get("key") == b"value"
    finally:
        signed.why_unsigned.cache_clear()


_UNSIGNED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
int setsockopt(int fd, int level, int name, const void *value, socklen_t length) {
    if (level == IPPROTO_TCP && (name == 14 || name == 32)) { errno = ENOPROTOOPT; return -1; }
    int (*real)(int, int, int, const void *, socklen_t) = dlsym(RTLD_NEXT, "setsockopt");
    return real(fd, level, name, value, length);
}
"""
"""A library: with it, the kernel has neither of the options that sign a connection's packets."""
_MEET = """
import torch
from hwrl.comm import connect_store, serve_store, store_address
from hwrl.weights import WeightReceiver, WeightSender

joined = connect_store(store_address(store := serve_store()))
with WeightSender(store, transport="host") as sender, WeightReceiver(joined, replica="r0") as receiver:
    sender.publish(1, torch.nn.Linear(2, 2))
    assert receiver.receive().version == 1
"""


def test_processes_of_one_machine_meet_where_the_kernel_cannot_sign_and_one_line_says_so(tmp_path: Path) -> None:
    compiler, source, library = shutil.which("cc"), tmp_path / "unsigned.c", tmp_path / "unsigned.so"
    if compiler is None:
        pytest.skip("needs a C compiler")
    source.write_text(_UNSIGNED)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source, "-ldl"], check=True)
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", _MEET], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot sign packets") == 1


@signed_only
def test_a_served_store_is_met_by_a_process_that_waits_for_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = KeyedAddress("127.0.0.1", port, "the run's")
    with ThreadPoolExecutor(1) as threads, socket.socket() as late:
        early = threads.submit(dial, address, timeout_s=100.0)
        late.bind(("127.0.0.1", port))
        require_key(late, address.key)
        late.listen()
        early.result().close()


def test_a_store_serves_new_clients_after_its_process_had_too_many_files() -> None:
    assert run_processes(_too_many_files, 1, timeout_s=600.0) == ["here"]


def _too_many_files(rank: int) -> str:
    store = serve_store()
    address = KeyedAddress.parse(store_address(store))
    limit, hard = 256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    with socket.socket() as early, contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            while True:
                opened.enter_context(open("/dev/null", "rb"))
        early.connect(("127.0.0.2" if address.host == "127.0.0.1" else address.host, address.port))
        early.settimeout(1.0)
        with contextlib.suppress(TimeoutError):  # not taken yet: no file is left for it
            assert early.recv(1) == b"", "taken and refused: no file is left to look at it"
    connect_store(store_address(store), timeout_s=300.0).set("key", "here")
    return store.get("key").decode()


# -- process groups ---------------------------------------------------------------------------------------------------


_CLONE_NEWUTS = 0x04000000
_HOST_NAME = b"127.0.0.5"  # an address of the loopback interface that nothing else uses


def test_a_group_that_meets_on_the_loopback_interface_listens_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = connect_store(store_address(serve := serve_store()))
    before = listeners()
    with Comm(CpuBackend(INFO)).standalone_group(store, rank=0, size=1, name="alone"):
        new = listeners() - before
    assert new and {host for host, _ in new} == {"127.0.0.1"}
    del serve


def test_the_default_group_of_a_store_on_the_loopback_interface_listens_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also its subgroups. By default Gloo listens at the address of the machine's name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = serve_store()
    found = run_processes(_default_groups, 2, store_address(store))
    if None in found:
        pytest.skip("only root gives a process another name of its machine")
    assert found == [[["127.0.0.1"], ["127.0.0.1"], ["127.0.0.5"]]] * 2


def _default_groups(rank: int, address: str) -> list[list[str]] | None:
    """Return where the default group listens, then its subgroups, then a group of torch's own."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWUTS) or libc.sethostname(_HOST_NAME, len(_HOST_NAME)):
        return None
    store, comm, hosts, known = connect_store(address), Comm(CpuBackend(INFO)), [], listeners()
    with comm.init_default(store=store, rank=rank, size=2, timeout_s=300.0) as group:
        hosts.append(_new_hosts(known))
        mesh = init_device_mesh("cpu", (2, 1))  # it makes groups by torch's new_group
        made = comm.new_group([0, 1], timeout_s=300.0), mesh.get_group(0), mesh.get_group(1)
        hosts.append(_new_hosts(known))
        torchs = dist.new_group([0, 1], backend="gloo")
        hosts.append(_new_hosts(known))
        group.barrier()
        del made, torchs
    return hosts


def _new_hosts(known: set[tuple[str, int]]) -> list[str]:
    """Return the hosts where this process listens since the last call; ``known`` are the older places."""
    new = listeners() - known
    known |= new
    return sorted({host for host, _ in new})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stranger_that_takes_a_ranks_place_in_a_group_hears_nothing(rank: int) -> None:
    """Gloo gives a place to the first connection that sends its number."""
    store = serve_store()
    making = beside(lambda: _make_group(connect_store(store_address(store)), rank))
    assert not await_keys(store, [f"group/listens/{rank}", f"group/0/{rank}"], timeout_s=200.0)
    place = tuple(json.loads(store.get(f"group/listens/{rank}"))[0])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hearing = beside(lambda: run_processes(_take_places, 1, place, taken.getsockname()))
        taken.accept()[0].close()
        for make in (making, beside(lambda: _make_group(store, 1 - rank))):
            with pytest.raises(CommError, match=r"a process that is no rank of it has connected, from 127\.0\.0\.1:"):
                make()
        assert hearing() == [0]


def _make_group(store: Any, rank: int) -> None:
    """Make a group, and send a tensor to the other rank."""
    group = CpuBackend(INFO).create_process_group(
        PrefixStore("group", store), rank=rank, size=2, name="g", timeout=timedelta(seconds=200.0)
    )
    group.broadcast(torch.ones(100), 0).wait()


def _take_places(_: int, place: tuple[str, int], taken: tuple[str, int]) -> int:
    """Connect to a rank at ``place`` as its peers, then to ``taken``; return how many bytes the rank sends."""
    become_a_stranger()
    with contextlib.ExitStack() as opened:
        connections = [opened.enter_context(socket.create_connection(place, 20.0)) for _ in range(4)]
        for number, connection in enumerate(connections):
            connection.sendall(struct.pack("<q", number))
        opened.enter_context(socket.create_connection(taken, 20.0))
        heard = 0
        for connection in connections:
            with contextlib.suppress(OSError):
                while said := connection.recv(1000):
                    heard += len(said)
        return heard
