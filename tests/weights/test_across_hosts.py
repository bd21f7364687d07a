"""The weight link between hosts: two network namespaces with a cable between them, and the cable can be pulled."""

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.comm.signed import why_unsigned
from hwrl.testing.processes import Processes, run_processes
from hwrl.weights import WeightReceiver, WeightSender
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
_INTERFACE = "hwrl0"
_WEIGHTS = {"w": torch.arange(200_000, dtype=torch.float32), "b": torch.tensor(1.5)}


@pytest.fixture(autouse=True, scope="module")
def only_where_namespaces_can_be_made() -> None:
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("needs iproute2 and util-linux")
    if (why := why_unsigned()) is not None:
        pytest.skip(f"a store for other hosts needs a key: {why}")
    try:
        made = run_processes(_leave_network, 1)
    except OSError as exc:
        pytest.skip(f"needs the right to make network namespaces: {exc}")
    assert made == [None]


def _leave_network(_: int = 0) -> None:
    """Move this thread and its later threads into a new network namespace without any interface."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _move_to_a_host_of_its_own(rank: int, directory: Path) -> CpuBackend:
    _leave_network()
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    _await(directory / "connected")
    return CpuBackend(INFO)


def _connect(directory: Path) -> list[str]:
    """Lay a cable between the two hosts; return their process numbers: these address the namespaces."""
    hosts = [_await(directory / f"pid-{rank}").read_text() for rank in range(2)]
    _ip("link", "add", _INTERFACE, "netns", hosts[0], "type", "veth", "peer", "name", _INTERFACE, "netns", hosts[1])
    for rank, host in enumerate(hosts):
        _ip("address", "add", f"10.77.0.{1 + rank}/24", "dev", _INTERFACE, host=host)
        for interface in ("lo", _INTERFACE):
            _ip("link", "set", interface, "up", host=host)
    (directory / "connected").write_text("now")
    return hosts


def _ip(*words: str, host: str | None = None) -> None:
    prefix = [] if host is None else ["nsenter", "--target", host, "--net"]
    subprocess.run([*prefix, "ip", *words], check=True, capture_output=True)


def _await(path: Path) -> Path:
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)
    return path


def _weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor + version) for name, tensor in _WEIGHTS.items()]


def _send_until_the_cable_is_pulled(rank: int, directory: Path) -> object:
    backend = _move_to_a_host_of_its_own(rank, directory)
    if rank:
        store = connect_store(_await(directory / "address").read_text())
        receiver = WeightReceiver(store, replica="far", backend=backend)
        for version in (1, 2):
            received = receiver.receive()
            assert all(torch.equal(received[name], tensor) for name, tensor in _weights(version))
        (directory / "pull").write_text("now")
        time.sleep(600)  # killed before
    served = serve_store("10.77.0.1")
    (directory / "address").write_text(store_address(served))
    with WeightSender(served, backend=backend, timeout_s=slow(2.0)) as sender:
        sender.wait_for_receivers(1)
        assert [sender.publish(version, _weights(version)).receivers for version in (1, 2)] == [1, 1]
        _await(directory / "pulled")
        begin = time.monotonic()
        report = sender.publish(3, _weights(3))
        return report.receivers, dict(report.excluded), time.monotonic() - begin


def test_weights_travel_from_host_to_host_and_a_host_that_cannot_be_reached_is_named_in_time(tmp_path: Path) -> None:
    with Processes(_send_until_the_cable_is_pulled, 2, tmp_path) as processes:
        hosts = _connect(tmp_path)
        _await(tmp_path / "pull")
        _ip("link", "set", _INTERFACE, "down", host=hosts[1])
        (tmp_path / "pulled").write_text("now")
        receivers, excluded, passed_s = processes.wait(0).value
    assert receivers == 0
    assert "far" in excluded
    assert passed_s < slow(10)
