"""The sockets of a process, and the addresses of stores."""

import fcntl
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.comm import process_sockets
from hwrl.comm.signed import KeyedAddress


def test_a_look_at_the_sockets_keeps_the_locks_of_files(tmp_path: Path) -> None:
    lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (tmp_path / "database").open("w") as file, socket.create_server(("127.0.0.1", 0)) as listener:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert listener.fileno() in [descriptor for descriptor, _ in process_sockets()]
        other = subprocess.run([sys.executable, "-c", lock, file.name], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost-gpu3", False),
        ("127.example.org", False),
        ("::1f", False),
        ("10.0.0.1", False),
    ],
)
def test_only_addresses_of_the_same_machine_are_on_its_loopback(host: str, is_loopback: bool) -> None:
    assert KeyedAddress(host, 1, "key").is_loopback is is_loopback
