"""Keep a run's private Ray closed to other users and machines: own directory, token, loopback interface."""

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
_LONGEST_SOCKET = "/hwrl-0000/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@contextlib.contextmanager
def private_ray() -> Iterator[Path]:
    """Within this block a started Ray serves only this user on this machine; yield the directory for its files.

    Ray makes its directory writable for all users, so we put it into a directory of mode 0700. The end of the block
    deletes it; the next run deletes the directory of a killed run. Each run has a new token.
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
    """Within this block Ray uses a token, and with ``security="tls"`` TLS as well; None leaves the environment alone.

    Raises ConfigError if TLS lacks one of its files.
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
            "cluster_security=tls lacks a file",
            why=f"no readable file is named by {', '.join(missing)}",
            fix="set them to this machine's certificate, its key, and the certificate of the cluster's authority",
        )


def check_security(security: str | None, address: str, *, is_open: bool | None) -> None:
    """Raise ConfigError if the cluster at ``address`` lacks ``security``. ``is_open`` is None if that is unknown."""
    if security is None or is_open is False:
        return
    raise ConfigError(
        f"the Ray cluster {address} does not fulfil cluster_security={security}",
        why="it admits clients without a token" if is_open else "only a host:port of its head can be checked",
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
    """Return whether this process uses a token on the cluster that it has joined."""
    return bool(_raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN)


def _base_directory() -> Path:
    """Return the directory for Ray's own one. Raises ConfigError if the paths of its sockets would be too long."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    room = _SOCKET_PATH_NBYTES - len(_LONGEST_SOCKET)
    if len(os.fsencode(base)) > room:
        raise ConfigError(
            f"Ray cannot run in {base}",
            why=f"the paths of its sockets may have {_SOCKET_PATH_NBYTES} bytes, and so the directory's {room}",
            fix="set RAY_TMPDIR to a directory with a shorter path, such as /tmp",
        )
    return base


@contextlib.contextmanager
def _own_directory(base: Path) -> Iterator[Path]:
    """Make a directory for this process, keep it locked, and delete it at the end."""
    try:
        own = _new_directory(base)
    except OSError as exc:
        raise ConfigError(
            f"Ray cannot run in {base}",
            why=f"it is not possible to create a directory there: {exc}",
            fix="set RAY_TMPDIR to a writable directory",
        ) from exc
    owner = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        _delete_abandoned(base)
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)  # an agent of Ray may still be writing there
        os.close(owner)


def _new_directory(base: Path) -> Path:
    while True:
        own = base / f"{_PREFIX}{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
            return own


def _delete_abandoned(base: Path) -> None:
    """Delete this user's directories of killed runs. Their locks are free."""
    for abandoned in base.glob(f"{_PREFIX}[0-9a-f][0-9a-f][0-9a-f][0-9a-f]"):
        with contextlib.suppress(OSError):  # it belongs to another user, is in use, or is gone
            if abandoned.is_symlink() or not (abandoned / _TOKEN).is_file():  # its run may not hold the lock yet
                continue
            owner = os.open(abandoned, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(abandoned)
            finally:
                os.close(owner)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change environment variables within this block, and let Ray read its settings of authentication again."""
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
    """Let Ray listen on the loopback interface only, as it does on systems without support for clusters.

    A node address of 127.0.0.1 does not help: Ray replaces it by an external address, and listens everywhere.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
