"""Which ranks see the same directory: one that all share, or one for each node, on a disk of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hwrl.checkpoint.directory.checkpoint_directory import DRAFT_PREFIX, CheckpointDirectory, usable
from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.saving.agreement import Agreement
from hwrl.errors import CheckpointError

_LOOK_S = 2.0  # a network file system may show a new file late


@dataclass
class Node:
    """The ranks that share this rank's directory: which node of how many, and their rounds among themselves.

    ``home`` is there on the first of these ranks only: it creates the directory's entries, renames and removes them.
    Likewise ``firsts``, the rounds of the first ranks of all nodes.
    """

    number: int
    count: int
    agreement: Agreement
    firsts: Agreement | None
    home: CheckpointDirectory | None = None

    @property
    def rank(self) -> int:
        """This rank's place among those of the node."""
        return self.agreement.ranks.index(self.agreement.rank)


def join_node(directory: Path, fs: DurableFS, agreement: Agreement) -> Node:
    """Return this rank's node; its ``home`` is not opened yet."""
    nodes = find_nodes(directory, fs, agreement)
    number = next(number for number, ranks in enumerate(nodes) if agreement.rank in ranks)
    mine = agreement.among(nodes[number], name=f"node{number}")
    firsts = agreement.among([ranks[0] for ranks in nodes], name="firsts") if mine.decides else None
    return Node(number, len(nodes), mine, firsts)


def find_nodes(directory: Path, fs: DurableFS, agreement: Agreement) -> list[list[int]]:
    """Return the ranks that see each ``directory``, lowest first, by node; a single node if all ranks share one.

    Every rank leaves a file of a name that nobody ever asked for, and looks for those of the others: names of hosts
    and of file systems prove nothing. Takes two seconds where disks are not shared. Raises
    :class:`~hwrl.errors.CheckpointError` if what the ranks see does not fit together.
    """
    if len(agreement.ranks) == 1:
        return [list(agreement.ranks)]
    mark = directory / f"{DRAFT_PREFIX}mark_{os.urandom(8).hex()}"

    def leave() -> str:
        with usable(directory):
            fs.mkdir(directory)
            fs.write_file(mark, b"")
        return mark.name

    try:
        names = agreement.decide(leave, list)
        nodes: list[list[int]] = agreement.decide(lambda: [socket.gethostname(), _look_for(names, directory)], _group)
    finally:
        with contextlib.suppress(OSError):  # the next save sweeps it
            fs.remove_tree(mark)
    agreement.vote(lambda: None)  # or the first rank would sweep marks that others are about to remove
    return nodes


def _look_for(names: Sequence[str], directory: Path) -> list[int]:
    """Return the ranks whose mark is here."""
    deadline_s = time.monotonic() + _LOOK_S
    while True:
        seen = [rank for rank, name in enumerate(names) if (directory / name).exists()]
        if len(seen) == len(names) or time.monotonic() > deadline_s:
            return seen
        time.sleep(0.05)


def _group(views: list[tuple[str, list[int]]]) -> list[list[int]]:
    for rank, (host, seen) in enumerate(views):
        for other in seen:
            if views[other][1] != seen:
                raise CheckpointError(
                    f"it cannot be told which ranks share a directory, rank {rank} on {host} among them",
                    why=f"it sees the files of ranks {seen}, and rank {other} those of {views[other][1]}",
                    fix="give all ranks one directory, or those of each node one on its own disk",
                )
    return sorted({tuple(seen): seen for _, seen in views}.values())
