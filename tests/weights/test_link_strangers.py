"""What a stranger can do to a weight link, and what a member's junk can: nothing, and an error of hwrl."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hwrl.comm import PrefixStore, Store, store_address
from hwrl.errors import HwrlError
from hwrl.interfaces import Handle
from hwrl.testing.processes import run_processes
from hwrl.weights import WeightReceiver, WeightSender
from hwrl.weights.control import ControlChannel
from hwrl.weights.transports.ipc import Window
from hwrl_cpu import INFO, CpuBackend
from tests.support.listeners import listeners
from tests.support.stranger import become_a_stranger
from tests.support.weight_link import channel_of, exchange, model_of, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture

_JUNK: list[str | bytes] = ["", "junk", b"\xff\xfe", "-1", "1e999", "[" * 5000, "null"]


def _depose(link: ControlChannel) -> None:
    link.begin_epoch()


def _join(link: ControlChannel) -> None:
    link.join("stranger")


def _corrupt_counters(link: ControlChannel) -> None:
    for counter in ("epochs", "newest proposal", "numbers", "joins"):
        link.store.set(counter, "junk")


def _forge_an_offer(link: ControlChannel) -> None:
    link.store.set("proposal/2", '{"version": -999999999}')
    link.store.set("newest proposal", "2")


def _vote_for_another(link: ControlChannel) -> None:
    link.store.set("vote/1/1", '["corrupt", "says the stranger"]')


def _exclude_a_member(link: ControlChannel) -> None:
    link.exclude(1, "a stranger says so")


def _decide(link: ControlChannel) -> None:
    link.store.set("decision/2", '["given up", "says the stranger"]')


def _delete(link: ControlChannel) -> None:
    for key in ("epochs", "newest proposal", "numbers", "joins", "join/1"):
        link.store.delete_key(key)


def _replace_the_layout(link: ControlChannel) -> None:
    link.store.set("layout/any", "{}")


def _flood(link: ControlChannel) -> None:
    for number in range(100):
        link.store.set(f"flood/{number}", "x" * 1000)


def _take_a_rank(link: ControlChannel) -> None:
    link.store.set("group/policy/0/0", "a stranger's address")


_ATTACKS: list[Callable[[ControlChannel], None]] = [
    _flood, _take_a_rank, _replace_the_layout, _decide, _vote_for_another, _join, _exclude_a_member, _forge_an_offer,
    _depose, _delete, _corrupt_counters,
]  # fmt: skip


def _attack(_: int, places: list[tuple[str, int]]) -> list[str]:
    """Try each attack at each of ``places``; return those that worked."""
    become_a_stranger()
    worked = []
    for host, port in places:
        if not _is_open_store((host, port)):
            continue
        taken = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]  # not in the stubs
        for attack in _ATTACKS:
            attack(channel_of(taken))
            worked.append(attack.__name__)
    return worked


def _is_open_store(place: tuple[str, int]) -> bool:
    """Return whether torch's client would be served at ``place``; torch itself would try for long, and print stacks."""
    magic, ping, nonce = b"\0" + struct.pack("<I", 0x3C85F7CE), b"\x0d", struct.pack("<I", 7)
    with contextlib.suppress(OSError), socket.create_connection(place, 0.1) as probe:
        probe.settimeout(0.1)
        probe.sendall(magic + ping + nonce)
        return probe.recv(4) == nonce
    return False


@pytest.mark.parametrize("transport", ["host", "device"])
def test_a_stranger_changes_nothing_on_a_link(store: Store, transport: str) -> None:
    with sender_of(store, transport=transport) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        places = sorted(listeners())
        assert len(places) >= 2, "the store, and the place inside this process"
        assert run_processes(_attack, 1, places) == [[]]
        report = exchange(sender, [receiver], 2)
        assert report.receivers == 1 and sender.new_receivers() == ()
        assert channel_of(store).epoch() == 1


def test_the_same_attacks_work_on_torchs_own_store() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # not in the stubs
    [worked] = run_processes(_attack, 1, [("127.0.0.1", torchs.port)])
    assert worked == [attack.__name__ for attack in _ATTACKS]
    assert PrefixStore("weights/policy", torchs).get("epochs") == b"junk"


def test_another_user_cannot_open_version_files(store: Store) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with sender_of(store, transport="host") as sender:
        sender.publish(1, model_of(1))
        files = _version_files()
        assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)
        assert run_processes(_open_as_a_stranger, 1, files) == [[]]
        assert [str(path) for path in files if _opens(path)], "the run's user opens them"


def _version_files() -> list[Path]:
    links = [Path(f"/proc/{os.getpid()}/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [link for link in links if "hwrl-weights" in _target(link)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _open_as_a_stranger(_: int, files: list[Path]) -> list[str]:
    become_a_stranger()
    return [str(path) for path in files if _opens(path)]


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


# -- junk of a member -------------------------------------------------------------------------------------------------


_NOTES = ["newest proposal", "abandoned", "excluded/1", "join/1"] + [
    f"{note}/{number}" for note in ("proposal", "start", "decision") for number in (1, 2)
]


@pytest.mark.parametrize("key", _NOTES)
def test_junk_in_a_note_is_an_error_of_hwrl_or_ignored(store: Store, key: str) -> None:
    with sender_of(store, transport="host", timeout_s=0.05) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        link = channel_of(store)
        for junk in _JUNK:
            link.store.set(key, junk)  # type: ignore[arg-type]  # bytes are not in the stubs
            _use(sender, receiver)


def _junk_handles() -> list[dict[str, str | int | None]]:
    fields = ("pid", "fd", "inode", "offset", "nbytes")
    junk: tuple[str | int | None, ...] = (None, "junk", -1, 1 << 70)  # None: the field is missing
    return [{field: value} for field in fields for value in junk]


@pytest.mark.parametrize("fields", _junk_handles(), ids=str)
def test_junk_in_a_handle_of_memory_is_an_error_of_hwrl(fields: dict[str, str | int | None]) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    handle = {**CpuBackend(INFO).export_memory(memory), **fields}
    with pytest.raises(HwrlError, match="cannot open another process's memory"):
        _opened_elsewhere({name: value for name, value in handle.items() if value is not None})


def _opened_elsewhere(handle: Handle) -> torch.Tensor:
    """Open ``handle`` as another process does, which has another identity."""
    fields = {name: value for name, value in handle.items() if name != "sum"} | {"process": "another"}
    return CpuBackend(INFO).open_memory({**fields, "sum": zlib.crc32(json.dumps(fields, sort_keys=True).encode())})


@pytest.mark.parametrize("fault", ["a pipe", "another file", "open to others", "another user's"])
def test_shared_memory_that_no_process_of_this_user_exported_is_not_opened(tmp_path: Path, fault: str) -> None:
    if fault == "another user's" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    if fault == "a pipe":
        os.mkfifo(tmp_path / "file")
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        os.fchmod(file, 0o604 if fault == "open to others" else 0o600)
        os.fchown(file, os.getuid() + (fault == "another user's"), -1)
        inode = os.fstat(file).st_ino + (fault == "another file")
        place: Handle = {"pid": os.getpid(), "fd": file, "inode": inode, "offset": 0, "nbytes": 0}
        with pytest.raises(HwrlError, match=r"is another file by now|belongs to another user or is open to others"):
            _opened_elsewhere(place)
    finally:
        os.close(file)


_WINDOW_JUNK = ["{}", '{"handles": [], "stay": [], "places": []}', '{"handles": [{}], "stay": [1], "places": [[0, 0]]}']


@pytest.mark.parametrize("junk", [*_JUNK, *_WINDOW_JUNK])
def test_junk_in_a_window_of_the_ipc_transport_is_an_error_of_hwrl(junk: str | bytes) -> None:
    note = junk.encode() if isinstance(junk, str) else junk
    with pytest.raises(HwrlError):
        for handle in Window.read(note, max_places=9).handles:
            CpuBackend(INFO).open_memory(handle)


@pytest.mark.parametrize("counter", ["epochs", "joins", "numbers", "proposal numbers"])
def test_junk_in_a_counter_is_an_error_of_hwrl(store: Store, counter: str) -> None:
    """Torch's server then drops each client that adds to the counter."""
    with sender_of(store, transport="host", timeout_s=0.05) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        channel_of(store).store.set(counter, "junk")
        _use(sender, receiver)


def _use(sender: WeightSender, receiver: WeightReceiver) -> None:
    for call in (
        receiver.poll,
        lambda: receiver.receive(timeout_s=0.01),
        lambda: sender.publish(2, model_of(2)),
        sender.new_receivers,
    ):
        with contextlib.suppress(HwrlError):
            call()


def test_the_address_of_a_store_is_in_no_repr_and_no_error(store: Store) -> None:
    key = store_address(store).partition("#")[2]
    with sender_of(store) as sender, receiver_of(store) as receiver:
        assert key not in f"{store!r}{sender!r}{receiver!r}"
