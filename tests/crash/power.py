"""The disk after a power cut: synced content is sure, and any part of the rest may be there.

The model is from ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018). The file system promises
little: a file's bytes are sure after a sync of the file, a name after a sync of its directory. Unsynced content may be
there or not: of a file any leading part of the later bytes, or zeros in their place; of a directory the changes up to
any one, in their order. Files and directories are independent of each other. A rename is one change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.disk import Operation

Pick = Callable[[int], int]
"""``pick(n)``: how many of ``n`` unsynced changes survive."""


@dataclass(frozen=True)
class Survival:
    """The surviving changes: ``names`` picks changes of directories, ``data`` picks appended bytes of files.

    With ``zeros``, files have their full length, with zeros for the lost bytes.
    """

    names: Pick
    data: Pick
    zeros: bool = False


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class _Directory:
    """``changes`` since the last sync; each maps names to their new nodes, None for removed names."""

    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    synced: dict[str, _File | _Directory] = field(default_factory=dict)
    changes: list[dict[str, _File | _Directory | None]] = field(default_factory=list)

    def change(self, change: dict[str, _File | _Directory | None]) -> None:
        self.changes.append(change)
        _apply(self.entries, change)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.entries), []

    def surviving(self, pick: Pick) -> dict[str, _File | _Directory]:
        entries = dict(self.synced)
        for change in self.changes[: pick(len(self.changes))]:
            _apply(entries, change)
        return entries


class Power:
    """A disk with the content of ``home``, all synced. :meth:`run` changes it, :meth:`cut` writes a rest."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._root = _read(home)

    def run(self, operation: Operation) -> None:
        """Make one recorded call. An impossible call changes nothing."""
        node, parent, name = self._find(operation.path)
        if parent is None or (operation.name != "create" and (node is None) != (operation.name == "mkdir")):
            return
        if operation.name == "mkdir":
            parent.change({name: _Directory()})
        elif operation.name == "create" and node is None:
            parent.change({name: _File()})
        elif operation.name == "rename":
            assert operation.to is not None and operation.to.parent == operation.path.parent, "within one directory"
            parent.change({name: None, operation.to.name: node})
        elif operation.name == "remove":
            parent.change({name: None})
        elif operation.name == "sync" and isinstance(node, _Directory):
            node.sync()
        elif operation.name != "attributes":
            assert isinstance(node, _File), operation
            _run_on_file(node, operation)

    def cut(self, into: Path, survival: Survival) -> None:
        """Write a possible rest to ``into``. It must not exist."""
        _write(self._root, into, survival)

    def _find(self, path: Path) -> tuple[_File | _Directory | None, _Directory | None, str]:
        """Return the node of ``path``, its parent directory, and its name there."""
        if path == self._home:
            return self._root, self._root, ""
        parent, _, _ = self._find(path.parent)
        if not isinstance(parent, _Directory):
            return None, None, path.name
        return parent.entries.get(path.name), parent, path.name


def survivals(seed: int, *, random_count: int = 3) -> Iterator[Survival]:
    """Yield the extremes, and ``random_count`` random ones."""
    chance = random.Random(seed)
    for names in (_none, _all):
        for data in (_none, _all):
            yield Survival(names, data)
    yield Survival(_all, _none, zeros=True)

    def pick(count: int) -> int:
        return chance.randint(0, count)

    for _ in range(random_count):
        yield Survival(pick, pick, zeros=chance.random() < 0.5)


def _none(count: int) -> int:
    return 0


def _all(count: int) -> int:
    return count


def _apply(entries: dict[str, _File | _Directory], change: dict[str, _File | _Directory | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _run_on_file(file: _File, operation: Operation) -> None:
    if operation.name == "sync":
        file.synced = bytes(file.content)
    elif operation.name == "write":
        file.content[operation.offset :] = operation.data
    elif operation.offset >= 0:  # cut
        del file.content[operation.offset :]


def _read(path: Path) -> _Directory:
    entries: dict[str, _File | _Directory] = {}
    for child in path.iterdir():
        content = b"" if child.is_dir() else child.read_bytes()
        entries[child.name] = _read(child) if child.is_dir() else _File(bytearray(content), content)
    return _Directory(entries, dict(entries))


def _write(directory: _Directory, into: Path, survival: Survival) -> None:
    into.mkdir()
    for name, node in directory.surviving(survival.names).items():
        if isinstance(node, _Directory):
            _write(node, into / name, survival)
        else:
            (into / name).write_bytes(_left(node, survival))


def _left(file: _File, survival: Survival) -> bytes:
    if bytes(file.content[: len(file.synced)]) != file.synced:  # overwritten or cut since: either is there
        return file.synced if survival.data(1) == 0 else bytes(file.content)
    lost = len(file.content) - len(file.synced)
    kept = bytes(file.content[: len(file.synced) + survival.data(lost)])
    return kept.ljust(len(file.content), b"\0") if survival.zeros else kept
