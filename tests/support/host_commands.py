"""The commands of ``ci/nodes``. ``up`` keeps the hosts, and takes the other commands over a socket in its directory."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from tests.support.host_network import HostNetwork, HostNetworkError, NetworkHost, why_unavailable

_CANNOT_RUN = 77
_SOCKET = "commands"


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
    if options.command == "up":
        return _up(options)
    address = str(options.directory / _SOCKET)
    request = {key: value for key, value in vars(options).items() if key != "directory"}
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(address)
        except OSError as exc:
            print(f"ci/nodes: no hosts are up ({address}: {exc}); `ci/nodes up` makes some", file=sys.stderr)
            return 1
        client.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(client.makefile().readline())
    if "error" in answer:
        print(f"ci/nodes: {answer['error']}", file=sys.stderr)
        return 1
    if "exec" in answer:
        os.execvpe(answer["exec"][0], answer["exec"], {**os.environ, **answer["env"]})
    return 0


def _up(options: argparse.Namespace) -> int:
    if (why := why_unavailable()) is not None:
        print(f"ci/nodes: {why}", file=sys.stderr)
        return _CANNOT_RUN
    directory: Path = options.directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"ci/nodes: hosts are up in {directory}; end them, or use another --directory", file=sys.stderr)
        return 1
    for left in directory.iterdir():  # files of hosts whose command was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    shared = [Path(one).resolve() for one in options.share]
    try:
        with HostNetwork(directory, count=options.count, shared=shared) as network:
            for host in network.hosts if options.ray else ():
                network.start_ray(host, cpus=options.ray)
            names = ", ".join(f"{host.index}: {host.name} {host.address}" for host in network.hosts)
            print(f"up: {names}; RAY_ADDRESS={network.environment['RAY_ADDRESS']}; Ctrl-C ends them", flush=True)
            _serve(network, directory / _SOCKET)
    except KeyboardInterrupt:
        pass
    except HostNetworkError as exc:
        print(f"ci/nodes: {exc}", file=sys.stderr)
        return 1
    return 0


def _serve(network: HostNetwork, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        while True:
            client = server.accept()[0]
            with client:
                request = json.loads(client.makefile().readline())
                try:
                    answer = _do(network, network.hosts[request["host"]], request)
                except (HostNetworkError, IndexError) as exc:
                    answer = {"error": str(exc)}
                client.sendall(json.dumps(answer).encode() + b"\n")


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
