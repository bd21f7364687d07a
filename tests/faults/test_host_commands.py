"""The commands of ``ci/nodes``: whose directory they accept, what they delete there, and what a bad client can do."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_commands import clear, require_own, serve_one
from tests.support.host_network import HostNetwork, HostNetworkError, NetworkHost


def test_only_what_hosts_have_left_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    directory = tmp_path / "nodes"
    for name in ("host0", "host12", "switch"):
        (directory / name / "tmp").mkdir(parents=True)
    (directory / "host1").symlink_to(tmp_path / "elsewhere")
    (directory / "commands").touch()
    (directory / "thesis.tex").touch()
    with pytest.raises(HostNetworkError, match=r"thesis\.tex, which is not of hosts; use another --directory"):
        clear(directory)
    assert len(list(directory.iterdir())) == 6, "nothing is deleted then"
    (directory / "thesis.tex").unlink()
    clear(directory)
    assert list(directory.iterdir()) == [] and (tmp_path / "elsewhere" / "kept").exists()


def test_hosts_delete_nothing_else_when_they_end(tmp_path: Path) -> None:
    network = HostNetwork(tmp_path, count=1)
    network.hosts[0].home.mkdir()
    (tmp_path / "thesis.tex").touch()
    network.close()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "nodes"
    directory.mkdir(mode=0o700)
    require_own(directory)
    directory.chmod(0o777)
    with pytest.raises(HostNetworkError, match="with mode 777, and must be yours alone"):
        require_own(directory)
    directory.chmod(0o700)
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(HostNetworkError, match="is no directory"):
        require_own(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
        with pytest.raises(HostNetworkError, match="belongs to user 65534"):
            require_own(directory)


class Network(HostNetwork):
    """Two hosts that are never started; their links cannot be cut."""

    def cut(self, host: NetworkHost) -> None:
        raise HostNetworkError("ip: no such link")


@pytest.fixture
def network(tmp_path: Path) -> HostNetwork:
    return Network(tmp_path, count=2)


def answer_to(network: HostNetwork, request: bytes) -> dict[str, Any]:
    client, server = socket.socketpair()
    with client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        serve_one(network, server)
        answer: dict[str, Any] = json.loads(client.makefile().readline())
    return answer


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (b"", "Expecting value"),
        (b"junk\n", "Expecting value"),
        (b'{"command": "cut", "host": 0}\n', "ip: no such link"),
        (b'{"command": "cut", "host": 2}\n', "there is no host 2; the hosts are 0 to 1"),
        (b'{"command": "cut", "host": -1}\n', "there is no host -1"),
    ],
)
def test_a_bad_request_is_an_answer_and_the_hosts_stay(network: HostNetwork, request_: bytes, says: str) -> None:
    assert says in answer_to(network, request_)["error"]


def test_a_client_that_leaves_does_not_end_the_hosts(network: HostNetwork) -> None:
    client, server = socket.socketpair()
    client.sendall(b'{"command": "cut", "host": 0}\n')
    client.close()
    serve_one(network, server)


def test_a_command_without_an_end_is_an_error_of_the_hosts(
    network: HostNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NetworkHost, "inside", lambda self, *command: list(command))
    with pytest.raises(HostNetworkError, match=r"sleep 60: no end within 0\.05 s"):
        network.hosts[0].run("sleep", "60", timeout_s=0.05)
