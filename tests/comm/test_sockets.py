"""The sockets of a process."""

import fcntl
import socket
import subprocess
import sys
from pathlib import Path

from hwrl.comm import process_sockets


def test_a_look_at_the_sockets_keeps_the_locks_of_files(tmp_path: Path) -> None:
    lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (tmp_path / "database").open("w") as file, socket.create_server(("127.0.0.1", 0)) as listener:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert listener.fileno() in [descriptor for descriptor, _ in process_sockets()]
        other = subprocess.run([sys.executable, "-c", lock, file.name], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr
