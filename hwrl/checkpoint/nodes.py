"""The checkpoint directory as all ranks have it, on one disk or on several: :class:`SharedDirectory`.

On a shared file system all ranks share one directory. Otherwise each host has its own disk, and only its ranks share a
directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwrl.checkpoint.agreement import Agreement, Round
from hwrl.checkpoint.directory import DRAFT_PREFIX, CheckpointDirectory, os_errors_as_checkpoint_errors
from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.manifest import find_checkpoints, step_of
from hwrl.errors import CheckpointError


@dataclass
class SharedDirectory:
    """The checkpoint directory of the ranks of ``agreement``, from :func:`open_shared` until :meth:`close`.

    A node is the ranks that share one directory on the disk; on a shared file system, the ranks of all hosts are one
    node. ``nodes`` has the ranks of each node, and ``node`` is the number of this rank's. Its lowest rank is the node
    leader. It alone has ``own``, and creates, renames and removes names in the directory, except for the markers of
    :func:`find_nodes`.

    ``damaged`` has the checkpoints that failed a verification: a hash is wrong, or a file cannot be read. The next save
    puts them aside.
    """

    path: Path
    agreement: Agreement
    fs: DurableFS
    nodes: list[list[int]]
    node: int
    own: CheckpointDirectory | None = None
    damaged: set[Path] = field(default_factory=set)

    @property
    def ranks(self) -> list[int]:
        """The ranks of this rank's node."""
        return self.nodes[self.node]

    def look(self, *, without: Collection[Path] = ()) -> dict[str, Any] | None:
        """Return the inventory of this node's disk as JSON, without some checkpoints; None on other ranks."""
        if self.own is None:
            return None
        with os_errors_as_checkpoint_errors(self.path):
            self.own.lock.require()
            announced_step = self.own.announced_step
        intact, skipped = find_checkpoints(self.path)
        parts = {info.path.name: info.manifest for info in intact if info.path not in without}
        return {
            "host": socket.gethostname(),
            "intact": {name: [part.save_id, part.node, part.nodes] for name, part in parts.items()},
            "skipped": {item.path.name: item.reason for item in skipped},
            "announced_step": announced_step,
        }

    def inventory(self, ranks: Round) -> Inventory:
        """Return the inventory of all nodes. All ranks call this; it ends the round ``ranks``."""
        looks = ranks.gather(self.look())
        return Inventory(**ranks.broadcast(None if looks is None else vars(merge_looks(looks))))

    def close(self) -> None:
        """Release the lock. May be called more than once."""
        own, self.own = self.own, None
        if own is not None:
            own.close()


def open_shared(
    path: Path, fs: DurableFS, agreement: Agreement, *, look_s: float, lock_wait_s: float
) -> SharedDirectory:
    """Open the directory ``path`` on all ranks: lock it on each node, and correct its tracker.

    The last writer may have died before it set the tracker to the newest complete step. Other programs rely on it. Some
    fail if the tracker names an incomplete checkpoint. Some silently start afresh if there is no tracker.
    """
    nodes = find_nodes(path, fs, agreement, look_s=look_s)
    node = next(number for number, ranks in enumerate(nodes) if agreement.rank in ranks)
    shared = SharedDirectory(path, agreement, fs, nodes, node)
    try:
        with agreement.round() as ranks:
            if agreement.rank == shared.ranks[0]:
                shared.own = CheckpointDirectory(path, fs, lock_wait_s=lock_wait_s)
            newest = shared.inventory(ranks).newest
        with agreement.round():
            if shared.own is not None and newest >= 0:
                with os_errors_as_checkpoint_errors(path):
                    shared.own.set_tracker(newest)
    except BaseException:
        shared.close()
        raise
    return shared


# -- which ranks share a directory ----------------------------------------------------------------------------------


def find_nodes(directory: Path, fs: DurableFS, agreement: Agreement, *, look_s: float) -> list[list[int]]:
    """Return the ranks of each node, in ascending order. If all ranks share ``directory``, there is one node.

    The names of hosts and file systems do not tell whether two ranks share a directory. So every rank creates a marker
    file with a random name in its directory, and looks for the marker files of all ranks. A network file system may
    show a new file late, so a rank looks for up to ``look_s`` seconds. No lock is held yet, so another manager may be
    using the directory. Raises :class:`~hwrl.errors.CheckpointError` if the ranks see contradictory markers.
    """
    if agreement.size == 1:
        return [[0]]
    marker = directory / f"{DRAFT_PREFIX}mark_{os.urandom(8).hex()}"
    try:
        with agreement.round() as ranks:
            with os_errors_as_checkpoint_errors(directory):
                fs.mkdir(directory, mode=0o700)
                fs.write_file(marker, b"")
            names = ranks.broadcast(ranks.gather(marker.name))
        with agreement.round() as ranks:
            seen = ranks.gather([socket.gethostname(), _look_for(names, directory, look_s=look_s)])
            nodes: list[list[int]] = ranks.broadcast(None if seen is None else group_by_seen_ranks(seen))
    finally:
        with contextlib.suppress(OSError):  # the next manager that opens the directory removes it
            fs.remove_tree(marker)
    # Wait until every rank has removed its marker. Otherwise the node leader would remove them as leftovers.
    with agreement.round():
        return nodes


def _look_for(names: Sequence[str], directory: Path, *, look_s: float) -> list[int]:
    """Return the ranks whose marker files are in ``directory``. ``names`` has the name of each rank's marker."""
    deadline_s = time.monotonic() + look_s
    while True:
        seen = [rank for rank, name in enumerate(names) if (directory / name).exists()]
        if len(seen) == len(names) or time.monotonic() > deadline_s:
            return seen
        time.sleep(0.05)


def group_by_seen_ranks(seen_by_rank: Sequence[tuple[str, list[int]]]) -> list[list[int]]:
    """Return the ranks of each node: ranks that see the marker files of each other and of no other rank.

    ``seen_by_rank`` has the host of each rank, and the ranks whose marker files it sees.
    """
    for rank, (host, seen) in enumerate(seen_by_rank):
        if rank not in seen:
            raise CheckpointError(
                f"the checkpoint directory of rank {rank} on {host} already has a writer",
                why="the marker file of this rank is gone: another run opened the directory, or saved there",
                fix="end that run, or choose another directory",
            )
        for other in seen:
            if seen_by_rank[other][1] != seen:
                raise CheckpointError(
                    f"cannot determine which ranks share a directory with rank {rank} on {host}",
                    why=f"rank {rank} sees the marker files of ranks {seen}, "
                    f"but rank {other} sees those of ranks {seen_by_rank[other][1]}",
                    fix="give all ranks one shared directory, or the ranks of each host a directory on its own disk",
                )
    return sorted({tuple(seen): seen for _, seen in seen_by_rank}.values())


# -- which checkpoints are complete ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inventory:
    """The checkpoints of all nodes.

    ``complete`` has the complete steps, oldest first. ``skipped`` maps the names of other directories to the reason; a
    part without the parts of other nodes is listed only if it is newer than all complete steps. ``lost``: at least one
    skipped directory may once have been a complete checkpoint, so ``resume`` must raise rather than start afresh. It is
    False if all of them are commits that never reached all nodes.
    """

    complete: list[int]
    skipped: dict[str, str]
    lost: bool

    @property
    def newest(self) -> int:
        """The newest complete step, or -1 if no step is complete."""
        return max(self.complete, default=-1)


def merge_looks(looks: Sequence[dict[str, Any] | None]) -> Inventory:
    """Merge the inventories of all nodes, which are the results of :meth:`SharedDirectory.look`.

    A step is complete if every present node has an intact part of it, and all parts are from the same save. We cannot
    look at the disks of absent nodes. If nodes that saved the step are absent, it counts as complete only if a present
    tracker holds this step or a later one, because trackers are written after all nodes have committed.

    This can be wrong if no older step is complete: a tracker is not set back, so it may hold a later step of the past.
    """
    nodes = [look for look in looks if look is not None]
    announced_step = max(node["announced_step"] for node in nodes)
    steps = {name: step_of(name) or 0 for node in nodes for name in node["intact"]}
    complete: list[int] = []
    partial: dict[str, str] = {}
    in_doubt: set[str] = set()
    for name, step in steps.items():
        parts = {number: node["intact"][name] for number, node in enumerate(nodes) if name in node["intact"]}
        _, _, saved_by = next(iter(parts.values()))
        if len(parts) < len(nodes):
            having = ", ".join(f"{number} ({nodes[number]['host']})" for number in parts)
            partial[name] = f"of {len(nodes)} nodes, only these have it: {having}"
        elif len({save_id for save_id, _, _ in parts.values()}) > 1:
            partial[name] = "the nodes have parts of different saves"
        elif step > announced_step and len({node for _, node, _ in parts.values()}) < saved_by:
            in_doubt.add(name)
            absent = "some of them are absent, and no tracker names it: they may lack their parts"
            partial[name] = f"{saved_by} nodes saved it, {absent}"
        else:
            complete.append(step)
    # Older partial steps were complete once: the nodes do not remove old steps at the same moment.
    partial = {name: reason for name, reason in partial.items() if steps[name] > max(complete, default=-1)}
    damaged = {name: reason for node in nodes for name, reason in node["skipped"].items()}
    lost = bool(damaged) or any(name in in_doubt or steps[name] <= announced_step for name in partial)
    return Inventory(sorted(complete), dict(sorted((partial | damaged).items())), lost)
