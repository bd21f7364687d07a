"""The commands of ``ci/nodes``. ``up`` keeps the hosts, and takes the other commands over a socket in its directory."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.host_network import HostNetwork, HostNetworkError, NetworkHost, why_unavailable

_CANNOT_RUN = 77
_SOCKET = "commands"
_OWN = re.compile(rf"host\d+|switch|{_SOCKET}")
"""The names of what hosts leave in their directory."""
_REQUEST_S = 100.0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/nodes", description="Hosts in network namespaces of this machine.")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/hwrl-nodes"), help="(default /tmp/hwrl-nodes)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make the hosts, and keep them until this command ends")
    up.add_argument("--count", type=int, default=2, help="hosts (default 2)")
    up.add_argument("--ray", type=int, metavar="CPUS", help="start a Ray node with so many processors on each host")
    up.add_argument("--share", type=Path, nargs="*", default=[], help="directories in /tmp that all hosts see")
    run = commands.add_parser("run", help="run a command on a host")
    run.add_argument("host", type=int)
    run.add_argument("words", nargs=argparse.REMAINDER)
    for name, text in [
        ("cut", "cut a host off"),
        ("join", "undo cut"),
        ("kill", "end a host with all its processes, and boot it again, without Ray"),
        ("slow", "limit a host's link"),
        ("unslow", "undo slow"),
    ]:
        command = commands.add_parser(name, help=text)
        command.add_argument("host", type=int)
        if name == "slow":
            command.add_argument("--mbit", type=float, required=True)
            command.add_argument("--delay-ms", type=float, default=0.0, help="needs netem in the kernel")
    return parser.parse_args()


def main() -> int:
    """Run one command; return the exit status."""
    options = _parse()
    try:
        return _up(options) if options.command == "up" else _request(options)
    except HostNetworkError as exc:
        print(f"ci/nodes: {exc}", file=sys.stderr)
        return 1


def require_own(directory: Path) -> None:
    """Raise HostNetworkError if another user may have made, or can change, what is in ``directory``.

    ``up`` deletes there as root, and the other commands run the command that its socket answers.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise HostNetworkError(f"{directory} is no directory; use another --directory")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise HostNetworkError(
            f"{directory} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, and must be yours "
            "alone to write; remove it, or use another --directory"
        )


def clear(directory: Path) -> None:
    """Delete what hosts have left there whose command was killed. Raises HostNetworkError for any other file."""
    left = sorted(directory.iterdir())
    others = [path.name for path in left if not _OWN.fullmatch(path.name)]
    if others:
        raise HostNetworkError(f"{directory} has {others[0]}, which is not of hosts; use another --directory")
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _request(options: argparse.Namespace) -> int:
    """Let ``up`` do a command, or say how; return the exit status."""
    address = str(options.directory / _SOCKET)
    request = {key: value for key, value in vars(options).items() if key != "directory"}
    with socket.socket(socket.AF_UNIX) as client:
        try:
            require_own(options.directory)
            client.connect(address)
        except OSError as exc:
            print(f"ci/nodes: no hosts are up ({address}: {exc}); `ci/nodes up` makes some", file=sys.stderr)
            return 1
        client.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(client.makefile().readline() or '{"error": "the hosts have ended"}')
    if "error" in answer:
        raise HostNetworkError(answer["error"])
    if "exec" in answer:
        os.execvpe(answer["exec"][0], answer["exec"], {**os.environ, **answer["env"]})
    return 0


def _up(options: argparse.Namespace) -> int:
    if (why := why_unavailable()) is not None:
        print(f"ci/nodes: {why}", file=sys.stderr)
        return _CANNOT_RUN
    directory: Path = options.directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(directory)
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HostNetworkError(f"hosts are up in {directory}; end them, or use another --directory") from None
    clear(directory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    shared = [Path(one).resolve() for one in options.share]
    try:
        with HostNetwork(directory, count=options.count, shared=shared) as network:
            for host in network.hosts if options.ray else ():
                network.start_ray(host, cpus=options.ray)
            names = ", ".join(f"{host.index}: {host.name} {host.address}" for host in network.hosts)
            print(f"up: {names}; RAY_ADDRESS={network.environment['RAY_ADDRESS']}; Ctrl-C ends them", flush=True)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(directory / _SOCKET))
                server.listen()
                _serve(network, server)
    except KeyboardInterrupt:
        pass
    finally:
        (directory / _SOCKET).unlink(missing_ok=True)
        with suppress(OSError):  # it has files of others
            directory.rmdir()
    return 0


def _serve(network: HostNetwork, server: socket.socket) -> None:
    while True:
        serve_one(network, server.accept()[0])


def serve_one(network: HostNetwork, client: socket.socket) -> None:
    """Do the command of ``client``, and answer. One that leaves, or sends no request, has no answer."""
    with client, suppress(OSError):
        client.settimeout(_REQUEST_S)
        text = client.makefile().readline()
        try:
            request = json.loads(text)
            answer = _do(network, _host_of(network, request["host"]), request)
        except (HostNetworkError, OSError, ValueError) as exc:
            answer = {"error": str(exc)}
        client.sendall(json.dumps(answer).encode() + b"\n")


def _host_of(network: HostNetwork, index: int) -> NetworkHost:
    if not 0 <= index < len(network.hosts):
        raise HostNetworkError(f"there is no host {index}; the hosts are 0 to {len(network.hosts) - 1}")
    return network.hosts[index]


def _do(network: HostNetwork, host: NetworkHost, request: dict[str, Any]) -> dict[str, Any]:
    command = request["command"]
    if command == "run":
        return {"exec": host.inside(*request["words"]), "env": network.environment}
    if command == "slow":
        network.slow(host, mbit=request["mbit"], delay_ms=request["delay_ms"])
    elif command == "kill":
        host.halt()
        network.boot(host)
    else:
        {"cut": network.cut, "join": network.join, "unslow": network.unslow}[command](host)
    return {}


if __name__ == "__main__":
    sys.exit(main())
