"""Keep a run's private Ray closed to other users and machines: a private directory, a token, the loopback interface."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray._private import ray_constants
from ray.exceptions import AuthenticationError

from hwrl.errors import ConfigError

_raylet: Any = importlib.import_module("ray._raylet")  # Ray's C++ part holds the settings of authentication
_PREFIX = "hwrl-"
_TOKEN = "token"
_TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_SOCKET_PATH_NBYTES = 107
_LONGEST_SOCKET = "/hwrl-00000000/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@contextlib.contextmanager
def private_ray() -> Iterator[Path]:
    """Make a Ray that starts in this block serve only this user on this machine. Yields the directory for its files.

    Ray makes its directory writable for all users, so it gets a parent directory of mode 0700. The parent is deleted at
    the end of the block. If a run is killed, the next run deletes it. Each run has a new token.
    """
    with _own_directory(_base_directory()) as own:
        token = own / _TOKEN
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        with (
            _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": None}),
            _loopback(),
        ):
            yield own / "r"


@contextlib.contextmanager
def secured(security: str | None) -> Iterator[None]:
    """Make Ray use a token in this block, and with ``security="tls"`` also TLS. None does not change the environment.

    Raises ConfigError if one of the files for TLS is missing.
    """
    if security is None:
        yield
        return
    changes: dict[str, str | None] = {"RAY_AUTH_MODE": "token"}
    if security == "tls":
        _check_tls_files()
        changes["RAY_USE_TLS"] = "1"
    with _environment(changes):
        yield


def _check_tls_files() -> None:
    missing = [name for name in _TLS_FILES if not os.access(os.environ.get(name, ""), os.R_OK)]
    if missing:
        raise ConfigError(
            "cluster_security=tls needs files that cannot be read",
            why=f"{', '.join(missing)} must name readable files",
            fix="set them to this machine's certificate, its key, and the certificate of the cluster's authority",
        )


def check_security(security: str | None, address: str, *, is_open: bool | None) -> None:
    """Raise ConfigError unless the cluster at ``address`` has ``security``.

    ``is_open`` says whether it admits clients without a token; None if that is not known.
    """
    if security is None or is_open is False:
        return
    raise ConfigError(
        f"the Ray cluster {address} does not satisfy cluster_security={security}",
        why="it admits clients without a token" if is_open else "only an address host:port of its head can be checked",
        fix="start its nodes with RAY_AUTH_MODE=token (docs/cluster.md)" if is_open else "set RAY_ADDRESS to host:port",
    )


def admits_without_token(address: str) -> bool:
    """Return whether the Ray cluster at ``address``, a host and port, accepts a client without a token."""
    with _environment({"RAY_AUTH_MODE": "disabled"}):
        try:
            _raylet.GcsClient(address=address)
        except AuthenticationError:
            return False
    return True


def has_token() -> bool:
    """Return whether this process uses a token in its connection to the cluster."""
    return bool(_raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN)


def _base_directory() -> Path:
    """Return the directory in which to make the private one: RAY_TMPDIR, or TMPDIR, or /tmp if TMPDIR is too long.

    Raises ConfigError if RAY_TMPDIR is too long for the paths of sockets.
    """
    room = _SOCKET_PATH_NBYTES - len(_LONGEST_SOCKET)
    base, chosen = Path(tempfile.gettempdir()), os.environ.get("RAY_TMPDIR")
    if chosen or len(os.fsencode(base)) > room:
        base = Path(chosen or "/tmp")
    if len(os.fsencode(base)) > room:
        raise ConfigError(
            f"Ray cannot run in {base}",
            why=f"paths of sockets have at most {_SOCKET_PATH_NBYTES} bytes, which leaves {room} for the directory's",
            fix="set RAY_TMPDIR to a directory with a shorter path, such as /tmp",
        )
    return base


@contextlib.contextmanager
def _own_directory(base: Path) -> Iterator[Path]:
    """Make a directory for this process, lock it during the block, and then delete it."""
    try:
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as exc:
        raise ConfigError(
            f"Ray cannot run in {base}",
            why=f"no directory can be created there: {exc}",
            fix="set RAY_TMPDIR to a writable directory",
        ) from exc
    owner = _open_directory(own)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        _delete_abandoned(base)
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)  # one of Ray's agents may still write to it
        os.close(owner)


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _delete_abandoned(base: Path) -> None:
    """Delete the directories that killed runs of this user have left. Nobody holds their locks."""
    for path in base.glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # it is in use, or was just deleted
            directory = _open_directory(path)
            try:
                if _is_abandoned(directory):
                    shutil.rmtree(path)
            finally:
                os.close(directory)


def _is_abandoned(directory: int) -> bool:
    """Return whether the open ``directory`` is a run's of this user. Raises BlockingIOError if the run goes on.

    Another user may put anything into a directory of this name, so nothing in it is read.
    """
    if os.fstat(directory).st_uid != os.geteuid():
        return False
    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return _TOKEN in os.listdir(directory)  # otherwise it is another program's, or its run starts


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change environment variables during the block, and make Ray read its authentication settings again."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Make Ray listen on the loopback interface only, as it does on systems on which it does not support clusters.

    Setting the node's address to 127.0.0.1 does not help: Ray replaces it with an external address, and listens on all
    interfaces.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
