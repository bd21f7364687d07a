"""Which checkpoints the disks hold: of one node (:class:`NodeInventory`), and of all nodes (:class:`Inventory`)."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory
from hwrl.checkpoint.format.manifest import find_checkpoints, step_of
from hwrl.checkpoint.saving.agreement import Agreement, Message


@dataclass(frozen=True)
class NodeInventory(Message):
    """The checkpoints on one node's disk.

    ``intact`` maps the names of directories intact on this disk to save ids, ``skipped`` maps the other names to the
    reason, and ``announced`` is the step in the tracker (-1 if there is none).
    """

    host: str
    intact: dict[str, str]
    skipped: dict[str, str]
    announced: int

    @classmethod
    def read(cls, directory: CheckpointDirectory, *, without: Collection[Path] = ()) -> NodeInventory:
        """Read the inventory from the disk. The checkpoints in ``without`` are left out: a hash is wrong."""
        intact, skipped = find_checkpoints(directory.path)
        return cls(
            host=socket.gethostname(),
            intact={info.path.name: info.manifest.save_id for info in intact if info.path not in without},
            skipped={one.path.name: one.reason for one in skipped},
            announced=directory.announced,
        )


@dataclass(frozen=True)
class RankInventory(Message):
    """What one rank adds to the inventory: its node's, from the first rank of each node, and None from the others."""

    node: NodeInventory | None

    @classmethod
    def read(cls, directory: CheckpointDirectory | None, *, without: Collection[Path] = ()) -> RankInventory:
        """Read it from the disk. Only the first rank of a node has a ``directory``."""
        return cls(None if directory is None else NodeInventory.read(directory, without=without))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        node = fields["node"]
        return cls(None if node is None else NodeInventory.from_json(node))


@dataclass(frozen=True)
class Inventory(Message):
    """The checkpoints of all nodes.

    ``complete`` has the steps intact on all nodes, from the same save, oldest first; ``skipped`` maps the other
    directories to the reason. ``lost`` says whether one of those may have been complete. It is False if only some nodes
    committed a first step: no tracker named it, so no reader relied on it.
    """

    complete: list[int]
    skipped: dict[str, str]
    lost: bool

    @property
    def newest(self) -> int:
        """The newest complete step, -1 if there is none."""
        return max(self.complete, default=-1)

    def uncommitted(self, directory: CheckpointDirectory) -> list[Path]:
        """Return the intact checkpoints in ``directory`` newer than the newest complete step."""
        return [info.path for info in directory.intact() if info.step > self.newest]


def take_inventory(agreement: Agreement, directory: CheckpointDirectory | None) -> Inventory:
    """Return the inventory of all nodes. A round of all ranks; the first rank of each node has a ``directory``."""
    with agreement.round() as ranks:
        answers = ranks.gather(RankInventory.read(directory))
        return ranks.broadcast(None if answers is None else merge_inventories(answers), Inventory)


def merge_inventories(answers: Sequence[RankInventory]) -> Inventory:
    """Merge the inventories of all nodes. A step is complete if it is intact on every node, from the same save."""
    nodes = [answer.node for answer in answers if answer.node is not None]
    holders = {
        name: [number for number, node in enumerate(nodes) if name in node.intact]
        for name in {name for node in nodes for name in node.intact}
    }
    on_all = {name for name in holders if len({node.intact.get(name) for node in nodes}) == 1}
    newest = max(map(_step, on_all), default=-1)
    # An older partial step was complete once: the nodes remove old steps one after the other.
    partial = {name: having for name, having in holders.items() if name not in on_all and _step(name) > newest}
    skipped = {name: _why_partial(nodes, having) for name, having in partial.items()}
    incomplete = {name: reason for node in nodes for name, reason in node.skipped.items()}
    announced = max(node.announced for node in nodes)
    lost = bool(incomplete) or any(_step(name) <= announced for name in partial)
    return Inventory(sorted(map(_step, on_all)), dict(sorted((skipped | incomplete).items())), lost)


def _why_partial(nodes: Sequence[NodeInventory], having: Sequence[int]) -> str:
    if len(having) == len(nodes):
        return "the nodes have it of different saves"
    named = ", ".join(f"{number} ({nodes[number].host})" for number in having)
    return f"of {len(nodes)} nodes only {named} have it"


def _step(name: str) -> int:
    step = step_of(name)
    assert step is not None, "find_checkpoints found it"
    return step
