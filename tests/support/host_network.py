"""Several hosts on one machine, joined by a switch: each has a network, a name, processes and a ``/tmp`` of its own.

A host is a set of Linux namespaces around one waiting process, which reads a pipe of this process. When this process
ends, for any reason, the pipe closes, and the kernel ends all processes of the hosts and removes their networks.
Nothing is made in the machine's own network.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

PORT = 6379
_TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname", "env")
_NETWORK = "10.77.0"
_LINK = "eth0"
_SWITCH = "switch"
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""Ray's command line. In an environment over another one, the command ``ray`` may be the other one's."""
_OBJECTS_NBYTES = 80_000_000
"""Ray's smallest object store, nearly."""
_BOOT = """
set -e
hostname "$1"; home=$2; shift 2
mkdir -p "$home/tmp"; chmod 1777 "$home/tmp"
for shared; do case $shared in /tmp/*)
    mkdir -p "$home/$shared"; mount --rbind "$shared" "$home/$shared" ;;
esac; done
mount --bind "$home/hosts" /etc/hosts
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --rbind "$home/tmp" /tmp
ip link set lo up
echo booted
exec env --ignore-signal=CHLD cat
"""
"""The first process of a host: it waits for the end of the pipe. It ignores SIGCHLD, so that it leaves no zombies. A
shell's ``read`` cannot be used here: it also ends when a process of the host is stopped, and then the host ends."""


class HostNetworkError(Exception):
    """A command for the hosts failed. The message has the command and its output."""


def _output(*words: str, timeout_s: float = 600.0, env: Mapping[str, str] | None = None) -> str:
    own = None if env is None else {**os.environ, **env}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, env=own)
    except subprocess.TimeoutExpired as exc:
        raise HostNetworkError(f"{' '.join(words)}: no end within {timeout_s:g} s") from exc
    if done.returncode:
        raise HostNetworkError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@functools.cache
def why_unavailable() -> str | None:
    """Return why this machine permits no such hosts; None if it does."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: apt-get install iproute2 util-linux)"
    switch = "ip link add br0 type bridge && ip link add ve0 type veth peer name ve1"
    try:
        _output("unshare", "-n", "-u", "-m", "-p", "-i", "-f", "--mount-proc", "sh", "-c", switch)
    except (OSError, HostNetworkError) as exc:
        return f"namespaces with a bridge are not permitted: {exc}"
    from hwrl.comm.signed import why_unsigned  # imports torch

    return why_unsigned()  # runs on several hosts are refused without a key


class NetworkHost:
    """One host. ``index`` counts from 0; :attr:`address` is its IPv4 address, and :attr:`name` its host name.

    Ray runs there with the variables in :attr:`environment`, beside those of the network.
    """

    def __init__(self, index: int, home: Path, shared: Sequence[Path]) -> None:
        self.index, self.name, self.address = index, f"host{index}", f"{_NETWORK}.{index + 1}"
        # Python and the tree may lie in /tmp, too.
        self.home, self._shared = home, [*map(str, shared), os.getcwd(), sys.prefix, sys.base_prefix]
        self.environment: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self.pid = 0

    @property
    def is_up(self) -> bool:
        """Whether the host runs."""
        return self._process is not None and self._process.poll() is None

    def boot(self) -> None:
        """Start the host: no process but one, an empty ``/tmp``, no network yet."""
        shutil.rmtree(self.home / "tmp", ignore_errors=True)
        namespaces = ["-n", "-u", "-m", "-p", "-i", "-f", "--mount-proc", "--kill-child", "--propagation", "private"]
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", _BOOT, "sh", self.name, str(self.home), *self._shared],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None, "it is a pipe"
        if self._process.stdout.readline() != "booted\n":
            raise HostNetworkError(f"{self.name} did not boot (its messages are above)")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text())

    def halt(self) -> None:
        """End the host with all its processes at once, as a loss of power does. Ended hosts stay ended."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "it is a pipe"
            pipe.close()
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired as exc:
            raise HostNetworkError(f"{self.name} has not ended within 30 s") from exc

    def inside(self, *command: str) -> list[str]:
        """Return ``command`` as a command that runs on this host, in the present directory.

        A signal to the outer command does not reach the inner one.
        """
        namespaces = ["--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--ipc"]
        return ["nsenter", *namespaces, "--", "env", "-C", os.getcwd(), *command]

    def run(self, *command: str, timeout_s: float = 600.0, env: Mapping[str, str] | None = None) -> str:
        """Run ``command`` on this host, with ``env`` beside the own variables; return its output.

        Raises HostNetworkError if it fails.
        """
        return _output(*self.inside(*command), timeout_s=timeout_s, env=env)

    def processes(self) -> list[int]:
        """Return the ids of all processes of this host but its first one, as this process sees them."""
        if not self.is_up:
            return []
        own, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == own and int(entry.name) != self.pid:
                    found.append(int(entry.name))
            except OSError:  # it has ended
                continue
        return found


class HostNetwork:
    """``count`` hosts and a switch between them. Use it as a context manager.

    ``directory`` gets their private files. They see each other's changes in all directories but ``/tmp`` and
    ``/dev/shm``; directories in ``shared`` may lie in ``/tmp``. Processes that use the Ray of the hosts need the
    variables in :attr:`environment`.
    """

    def __init__(self, directory: Path, *, count: int, shared: Sequence[Path] = ()) -> None:
        self.directory = directory
        self._switch = NetworkHost(count, directory / _SWITCH, ())
        self.hosts = [NetworkHost(index, directory / f"host{index}", shared) for index in range(count)]
        self.environment = {
            "RAY_ADDRESS": f"{self.hosts[0].address}:{PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    def __enter__(self) -> HostNetwork:
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        for host in (self._switch, *self.hosts):
            host.home.mkdir(parents=True, exist_ok=True)
            (host.home / "hosts").write_text("\n".join(lines) + "\n")
        try:
            self._switch.boot()
            self._on_switch("ip", "link", "add", _SWITCH, "type", "bridge")
            self._on_switch("ip", "link", "set", _SWITCH, "up")
            for host in self.hosts:
                self.boot(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and delete their private files."""
        for host in (*self.hosts, self._switch):
            host.halt()
            shutil.rmtree(host.home, ignore_errors=True)

    def boot(self, host: NetworkHost) -> None:
        """Start an ended host, with its network."""
        host.boot()
        port = f"p{host.index}"
        self._on_switch("sh", "-c", f"ip link del {port} 2>/dev/null || true")  # of its earlier life
        # The switch sees no processes of the host, so the machine lays the cable.
        _output(
            *("nsenter", "--target", str(self._switch.pid), "--net"),
            *("ip", "link", "add", port, "type", "veth", "peer", "name", _LINK, "netns", str(host.pid)),
        )
        self._on_switch("ip", "link", "set", port, "master", _SWITCH, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", _LINK)
        host.run("ip", "link", "set", _LINK, "up")
        host.run("ip", "route", "add", "default", "dev", _LINK)  # so that programs find the address of the host

    def cut(self, host: NetworkHost) -> None:
        """Cut ``host`` off from the others; no packet passes, and no end of a connection is told."""
        self._on_switch("ip", "link", "set", f"p{host.index}", "down")

    def join(self, host: NetworkHost) -> None:
        """Undo :meth:`cut`."""
        self._on_switch("ip", "link", "set", f"p{host.index}", "up")

    def slow(self, host: NetworkHost, *, mbit: float, delay_ms: float = 0.0) -> None:
        """Limit the link of ``host`` to ``mbit`` Mbit/s each way, with a delay of ``delay_ms`` if the kernel can delay.

        Raises HostNetworkError if it cannot.
        """
        self.unslow(host)
        limit = ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms"]
        if delay_ms:
            limit = ["root", "netem", "delay", f"{delay_ms:g}ms", "rate", f"{mbit:g}mbit"]
        host.run("tc", "qdisc", "replace", "dev", _LINK, *limit)
        self._on_switch("tc", "qdisc", "replace", "dev", f"p{host.index}", *limit)

    def unslow(self, host: NetworkHost) -> None:
        """Undo :meth:`slow`."""
        host.run("sh", "-c", f"tc qdisc del dev {_LINK} root 2>/dev/null || true")
        self._on_switch("sh", "-c", f"tc qdisc del dev p{host.index} root 2>/dev/null || true")

    def start_ray(
        self, host: NetworkHost, *, cpus: int, dashboard: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        """Start a Ray node of ``cpus`` processors on ``host``. Host 0 is the head. ``settings`` are Ray's variables."""
        role = [f"--address={self.environment['RAY_ADDRESS']}"]
        if host.index == 0:
            role = ["--head", f"--port={PORT}", f"--include-dashboard={str(dashboard).lower()}"]
        sizes = [f"--num-cpus={cpus}", f"--object-store-memory={_OBJECTS_NBYTES}"]
        began_s = time.monotonic()
        while True:
            try:
                own = f"--node-ip-address={host.address}"
                command = [*RAY, "start", *role, own, *sizes, "--disable-usage-stats"]
                host.run(*command, timeout_s=900.0, env={**self.environment, **host.environment, **(settings or {})})
            except HostNetworkError:
                if time.monotonic() - began_s > 120.0:  # the head may still believe in the node's earlier life
                    raise
            else:
                return

    def _on_switch(self, *command: str) -> None:
        self._switch.run(*command)
