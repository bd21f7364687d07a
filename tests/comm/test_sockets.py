"""The sockets of a process, and the addresses of stores."""

import ctypes
import fcntl
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.comm import process_sockets
from hwrl.comm.signed import KeyedAddress
from tests.support.speed import slow


def test_a_look_at_the_sockets_keeps_the_locks_of_files(tmp_path: Path) -> None:
    lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (tmp_path / "database").open("w") as file, socket.create_server(("127.0.0.1", 0)) as listener:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert listener.fileno() in [descriptor for descriptor, _ in process_sockets()]
        other = subprocess.run([sys.executable, "-c", lock, file.name], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr


def test_a_look_at_the_sockets_inside_another_sees_each_once() -> None:
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for descriptor, mine in process_sockets():
            if descriptor == listener.fileno():
                seen += [number for number, other in process_sockets() if other.getsockname() == mine.getsockname()]
        assert seen == [listener.fileno()]


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


NAME_SERVER = """
import ctypes, socket, struct, time
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 0))
silent.settimeout(0.1)
libc = ctypes.CDLL(None)
libc.__res_init()
libc.__res_state.restype = ctypes.c_void_p
state = libc.__res_state()  # resolver(3): nscount follows two ints and a long, the servers follow it
ctypes.c_int.from_address(state + 16).value = 1
port = socket.htons(silent.getsockname()[1])
server = struct.pack("=HH4s8x", socket.AF_INET, port, socket.inet_aton("127.0.0.1"))
ctypes.memmove(state + 20, server, len(server))
from hwrl.comm import serve_store
limits = (ctypes.c_int * 2).from_address(state)
before, began_s = list(limits), time.monotonic()
store = serve_store()
print(time.monotonic() - began_s)
print(list(limits) == before)
silent.recv(512)
"""


def test_a_silent_name_server_delays_a_store_by_a_second() -> None:
    """Torch asks it for the name of the loopback; the C library waits 10 s for an answer by default."""
    if not hasattr(ctypes.CDLL(None), "__res_state"):
        pytest.skip("the C library is not glibc")
    done = subprocess.run([sys.executable, "-c", NAME_SERVER], capture_output=True, text=True)
    if "TimeoutError" in done.stderr:
        pytest.skip("this machine finds the loopback's name without a name server")
    seconds, left = done.stdout.splitlines()
    assert 0.9 < float(seconds) < slow(5), done.stderr
    assert left == "True", "the thread's own limits are back"
