"""Which ranks share a directory: all of them, or the ranks of each node on a disk of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hwrl.checkpoint.directory.checkpoint_directory import DRAFT_PREFIX, os_errors_as_checkpoint_errors
from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.saving.agreement import Agreement, Message
from hwrl.errors import CheckpointError


@dataclass(frozen=True)
class Node:
    """The ranks with one directory, this rank among them: node ``number`` of ``count``.

    ``agreement`` is among the ranks of the node. Its leader creates, renames and removes the directory's entries.
    ``leaders`` is the agreement among the leaders of all nodes, and None on the other ranks.
    """

    number: int
    count: int
    agreement: Agreement
    leaders: Agreement | None

    @property
    def rank(self) -> int:
        """This rank's number on its node."""
        return self.agreement.ranks.index(self.agreement.rank)


@dataclass(frozen=True)
class _Marker(Message):
    """The name of a rank's file in its directory."""

    name: str


@dataclass(frozen=True)
class _Markers(Message):
    """The names of all ranks' files, in the order of the ranks."""

    names: list[str]


@dataclass(frozen=True)
class Sight(Message):
    """A rank on ``host`` sees the files of these ``ranks``."""

    host: str
    ranks: list[int]


@dataclass(frozen=True)
class _NodeRanks(Message):
    """The ranks of each node."""

    nodes: list[list[int]]


def join_node(directory: Path, fs: DurableFS, agreement: Agreement, *, look_s: float) -> Node:
    """Return this rank's node."""
    nodes = find_nodes(directory, fs, agreement, look_s=look_s)
    number = next(number for number, ranks in enumerate(nodes) if agreement.rank in ranks)
    own = agreement.among(nodes[number], name=f"node{number}")
    leaders = agreement.among([ranks[0] for ranks in nodes], name="firsts") if own.leads else None
    return Node(number, len(nodes), own, leaders)


def find_nodes(directory: Path, fs: DurableFS, agreement: Agreement, *, look_s: float) -> list[list[int]]:
    """Return the ranks of each node, lowest first: one node if all ranks share ``directory``.

    Names of hosts and of file systems prove nothing. So every rank leaves a file with a random name and looks for the
    files of the others. It looks for ``look_s`` if they do not appear, because a network file system may show a new
    file late. Raises :class:`~hwrl.errors.CheckpointError` if the answers contradict each other.
    """
    if len(agreement.ranks) == 1:
        return [list(agreement.ranks)]
    marker = directory / f"{DRAFT_PREFIX}mark_{os.urandom(8).hex()}"
    try:
        with agreement.round() as ranks:
            with os_errors_as_checkpoint_errors(directory):
                fs.mkdir(directory)
                fs.write_file(marker, b"")
            markers = ranks.gather(_Marker(marker.name))
            names = ranks.broadcast(None if markers is None else _Markers([one.name for one in markers]), _Markers)
        with agreement.round() as ranks:
            sights = ranks.gather(Sight(socket.gethostname(), _look_for(names.names, directory, look_s=look_s)))
            found = ranks.broadcast(None if sights is None else _NodeRanks(group_by_sight(sights)), _NodeRanks)
    finally:
        with contextlib.suppress(OSError):  # the next save removes it
            fs.remove_tree(marker)
    with agreement.vote():  # all markers are removed; otherwise the first rank would sweep those of the others
        return found.nodes


def _look_for(names: Sequence[str], directory: Path, *, look_s: float) -> list[int]:
    """Return the ranks with a file in ``directory``."""
    deadline_s = time.monotonic() + look_s
    while True:
        seen = [rank for rank, name in enumerate(names) if (directory / name).exists()]
        if len(seen) == len(names) or time.monotonic() > deadline_s:
            return seen
        time.sleep(0.05)


def group_by_sight(sights: Sequence[Sight]) -> list[list[int]]:
    """Return the ranks of each node: they see each other's files, and no others."""
    for rank, sight in enumerate(sights):
        if rank not in sight.ranks:
            raise CheckpointError(
                f"the checkpoint directory of rank {rank} on {sight.host} already has a writer",
                why="the file that this rank left there is gone: another run opened the directory or saved there",
                fix="end that run, or choose another directory",
            )
        for other in sight.ranks:
            if sights[other].ranks != sight.ranks:
                raise CheckpointError(
                    f"it cannot be told which ranks share a directory, rank {rank} on {sight.host} among them",
                    why=f"it sees the files of ranks {sight.ranks}, and rank {other} those of {sights[other].ranks}",
                    fix="give all ranks one directory, or the ranks of each node one on its own disk",
                )
    return sorted({tuple(sight.ranks): sight.ranks for sight in sights}.values())
