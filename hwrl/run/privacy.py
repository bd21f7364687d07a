"""What keeps a Ray that a run starts to its user and machine: a directory, a token, and the loopback interface."""

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

_raylet: Any = importlib.import_module("ray._raylet")  # Ray's C++ part, which keeps the settings of authentication
_PREFIX = "hwrl-"
_TOKEN = "token"
_SOCKET_PATH_NBYTES = 107
_LONGEST = "/hwrl-0000/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@contextlib.contextmanager
def private_ray() -> Iterator[Path]:
    """While this is entered, a Ray that is started is this user's and this machine's alone; yield its directory.

    Ray makes its directory writable by all, so the one around it has mode 0700. It is deleted at the end; what a killed
    run left is deleted by the next one. The token is a new one for each run.
    """
    with _own_directory(_base()) as own:
        token = own / _TOKEN
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        with (
            _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": None}),
            _loopback(),
        ):
            yield own / "r"


def admits_strangers(address: str) -> bool:
    """Return whether the Ray cluster at ``address``, a host's port, lets in a client that has no token."""
    with _environment({"RAY_AUTH_MODE": "disabled"}):
        try:
            _raylet.GcsClient(address=address)
        except AuthenticationError:
            return False
    return True


def has_token() -> bool:
    """Return whether this process, which has joined a cluster, shows a token there."""
    return bool(_raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN)


def _base() -> Path:
    """Return where Ray's directory goes. Raises ConfigError if the paths of its sockets would be too long there."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    room = _SOCKET_PATH_NBYTES - len(_LONGEST)
    if len(os.fsencode(base)) > room:
        raise ConfigError(
            f"Ray cannot run in {base}",
            why=f"the paths of its sockets may have {_SOCKET_PATH_NBYTES} bytes, so that of the directory {room}",
            fix="set RAY_TMPDIR to a directory with a shorter path, such as /tmp",
        )
    return base


@contextlib.contextmanager
def _own_directory(base: Path) -> Iterator[Path]:
    """Make a directory for this process alone, which it holds locked, and delete it at the end."""
    try:
        own = _new_directory(base)
    except OSError as exc:
        raise ConfigError(
            f"Ray cannot run in {base}",
            why=f"a directory cannot be made there: {exc}",
            fix="set RAY_TMPDIR to a directory that you can write to",
        ) from exc
    owner = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        _sweep(base)
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


def _sweep(base: Path) -> None:
    """Delete this user's directories of runs that were killed: nobody holds their locks."""
    for left in base.glob(f"{_PREFIX}[0-9a-f][0-9a-f][0-9a-f][0-9a-f]"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            if left.is_symlink() or not (left / _TOKEN).is_file():  # which is written under the lock
                continue
            owner = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(owner)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change what Ray reads of authentication, which it keeps once it has read it."""
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
    """Let Ray listen on the loopback interface only, as by default on the systems where it supports one host only.

    Given 127.0.0.1 as a node's address, Ray replaces it by an outer one, and listens everywhere.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
