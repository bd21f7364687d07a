"""Find out which ranks share a checkpoint directory: :class:`Node` and :func:`find_own_node`.

On a shared file system all ranks share one directory. Otherwise each host has its own disk, and only its ranks share a
directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hwrl.checkpoint.agreement import Agreement, Message
from hwrl.checkpoint.directory import DRAFT_PREFIX, os_errors_as_checkpoint_errors
from hwrl.checkpoint.durable import DurableFS
from hwrl.errors import CheckpointError


@dataclass(frozen=True)
class Node:
    """The ranks that share this rank's checkpoint directory. There are ``count`` nodes, numbered from 0.

    A node is not a host: on a shared file system, the ranks of all hosts are one node.

    ``agreement`` is among the ranks of this node. Its leader, the node leader, is the lowest rank. Only the node leader
    creates, renames and removes names in the directory, except for the markers of :func:`find_nodes`. ``leaders`` is
    the agreement among the leaders of all nodes; it is None on all other ranks.
    """

    number: int
    count: int
    agreement: Agreement
    leaders: Agreement | None

    @property
    def rank(self) -> int:
        """This rank's number among the ranks of its node."""
        return self.agreement.ranks.index(self.agreement.rank)


@dataclass(frozen=True)
class _Marker(Message):
    """The name of a rank's marker file in its checkpoint directory."""

    name: str


@dataclass(frozen=True)
class _Markers(Message):
    """The names of all ranks' marker files, in the order of the ranks."""

    names: list[str]


@dataclass(frozen=True)
class SeenRanks(Message):
    """The ranks whose marker files one rank sees. ``host`` is the host of the rank that sees them."""

    host: str
    ranks: list[int]


@dataclass(frozen=True)
class _NodeRanks(Message):
    """The ranks of each node."""

    nodes: list[list[int]]


def find_own_node(directory: Path, fs: DurableFS, agreement: Agreement, *, look_s: float) -> Node:
    """Return this rank's node. Every rank of ``agreement`` must call this. See :func:`find_nodes`."""
    nodes = find_nodes(directory, fs, agreement, look_s=look_s)
    number = next(number for number, ranks in enumerate(nodes) if agreement.rank in ranks)
    own = agreement.among(nodes[number], name=f"node{number}")
    leaders = agreement.among([ranks[0] for ranks in nodes], name="firsts") if own.leads else None
    return Node(number, len(nodes), own, leaders)


def find_nodes(directory: Path, fs: DurableFS, agreement: Agreement, *, look_s: float) -> list[list[int]]:
    """Return the ranks of each node, in ascending order. If all ranks share ``directory``, there is one node.

    The names of hosts and file systems do not tell whether two ranks share a directory. So every rank creates a marker
    file with a random name in its directory, and looks for the marker files of all ranks. A network file system may
    show a new file late, so a rank looks for up to ``look_s`` seconds. No lock is held yet, so another manager may be
    using the directory. Raises :class:`~hwrl.errors.CheckpointError` if the ranks see contradictory markers.
    """
    if len(agreement.ranks) == 1:
        return [list(agreement.ranks)]
    marker = directory / f"{DRAFT_PREFIX}mark_{os.urandom(8).hex()}"
    try:
        with agreement.round() as ranks:
            with os_errors_as_checkpoint_errors(directory):
                fs.mkdir(directory, mode=0o700)
                fs.write_file(marker, b"")
            markers = ranks.gather(_Marker(marker.name))
            all_names = None if markers is None else _Markers([rank_marker.name for rank_marker in markers])
            names = ranks.broadcast(all_names, _Markers).names
        with agreement.round() as ranks:
            seen = ranks.gather(SeenRanks(socket.gethostname(), _look_for(names, directory, look_s=look_s)))
            found = ranks.broadcast(None if seen is None else _NodeRanks(group_by_seen_ranks(seen)), _NodeRanks)
    finally:
        with contextlib.suppress(OSError):  # the next manager that opens the directory removes it
            fs.remove_tree(marker)
    # Wait until every rank has removed its marker. Otherwise the node leader would remove them as leftovers.
    with agreement.vote():
        return found.nodes


def _look_for(names: Sequence[str], directory: Path, *, look_s: float) -> list[int]:
    """Return the ranks whose marker files are in ``directory``. ``names`` has the name of each rank's marker."""
    deadline_s = time.monotonic() + look_s
    while True:
        seen = [rank for rank, name in enumerate(names) if (directory / name).exists()]
        if len(seen) == len(names) or time.monotonic() > deadline_s:
            return seen
        time.sleep(0.05)


def group_by_seen_ranks(seen_by_rank: Sequence[SeenRanks]) -> list[list[int]]:
    """Return the ranks of each node: ranks that see the marker files of each other and of no other rank."""
    for rank, seen in enumerate(seen_by_rank):
        if rank not in seen.ranks:
            raise CheckpointError(
                f"the checkpoint directory of rank {rank} on {seen.host} already has a writer",
                why="the marker file of this rank is gone: another run opened the directory, or saved there",
                fix="end that run, or choose another directory",
            )
        for other in seen.ranks:
            if seen_by_rank[other].ranks != seen.ranks:
                raise CheckpointError(
                    f"cannot determine which ranks share a directory with rank {rank} on {seen.host}",
                    why=f"rank {rank} sees the marker files of ranks {seen.ranks}, "
                    f"but rank {other} sees those of ranks {seen_by_rank[other].ranks}",
                    fix="give all ranks one shared directory, or the ranks of each host a directory on its own disk",
                )
    return sorted({tuple(seen.ranks): seen.ranks for seen in seen_by_rank}.values())
