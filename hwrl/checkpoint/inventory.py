"""Which checkpoints exist: on one node's disk (:class:`NodeInventory`), and on all nodes (:class:`Inventory`)."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hwrl.checkpoint.agreement import Agreement, Message
from hwrl.checkpoint.directory import CheckpointDirectory, os_errors_as_checkpoint_errors
from hwrl.checkpoint.manifest import Manifest, find_checkpoints, step_of
from hwrl.files import require_owned


@dataclass(frozen=True)
class IntactPart(Message):
    """One node's part of a checkpoint, intact on this disk. The save ``save_id`` has a part on each of ``nodes``."""

    save_id: str
    node: int
    nodes: int

    @classmethod
    def of(cls, manifest: Manifest) -> IntactPart:
        """Return what the manifest of the part says."""
        return cls(manifest.save_id, manifest.node, manifest.nodes)


@dataclass(frozen=True)
class NodeInventory(Message):
    """The checkpoints on one node's disk.

    ``intact`` maps the names of the directories that are intact on this disk to their parts. ``skipped`` maps the names
    of the others to the reason. ``announced_step`` is the step in this node's tracker, or -1 if it holds no step.
    """

    host: str
    intact: dict[str, IntactPart]
    skipped: dict[str, str]
    announced_step: int

    @classmethod
    def read(cls, directory: CheckpointDirectory, *, without: Collection[Path] = ()) -> NodeInventory:
        """Read the inventory from the disk. Leave out ``without``: the checkpoints that failed the verification."""
        with os_errors_as_checkpoint_errors(directory.path):
            require_owned(directory.path)
        intact, skipped = find_checkpoints(directory.path)
        return cls(
            host=socket.gethostname(),
            intact={info.path.name: IntactPart.of(info.manifest) for info in intact if info.path not in without},
            skipped={item.path.name: item.reason for item in skipped},
            announced_step=directory.announced_step,
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        intact = {name: IntactPart.from_json(part) for name, part in fields["intact"].items()}
        return cls(**fields | {"intact": intact})


@dataclass(frozen=True)
class RankInventory(Message):
    """One rank's contribution to the inventory: the inventory of its node from a node leader, None from other ranks."""

    node: NodeInventory | None

    @classmethod
    def read(cls, directory: CheckpointDirectory | None, *, without: Collection[Path] = ()) -> RankInventory:
        """Read it from the disk. ``directory`` is None except on node leaders."""
        return cls(None if directory is None else NodeInventory.read(directory, without=without))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        node = fields["node"]
        return cls(None if node is None else NodeInventory.from_json(node))


@dataclass(frozen=True)
class Inventory(Message):
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

    def uncommitted(self, directory: CheckpointDirectory) -> list[Path]:
        """Return the intact checkpoints in ``directory`` that are newer than the newest complete step."""
        return [info.path for info in directory.intact() if info.step > self.newest]


def gather_inventory(agreement: Agreement, directory: CheckpointDirectory | None) -> Inventory:
    """Return the inventory of all nodes. All ranks must call this; ``directory`` is None except on node leaders."""
    with agreement.round() as ranks:
        answers = ranks.gather(RankInventory.read(directory))
        return ranks.broadcast(None if answers is None else merge_inventories(answers), Inventory)


def merge_inventories(answers: Sequence[RankInventory]) -> Inventory:
    """Merge the inventories of all nodes.

    A step is complete if every present node has an intact part of it, and all parts are from the same save. We cannot
    look at the disks of absent nodes. If nodes that saved the step are absent, it counts as complete only if a present
    tracker holds this step or a later one, because trackers are written after all nodes have committed.

    This can be wrong if no older step is complete: a tracker is not set back, so it may hold a later step of the past.
    """
    nodes = [answer.node for answer in answers if answer.node is not None]
    announced_step = max(node.announced_step for node in nodes)
    names = {name for node in nodes for name in node.intact}
    on_all = {name for name in names if len(_save_ids(name, nodes)) == 1}
    in_doubt = {name for name in on_all if _step(name) > announced_step and _lacks_parts(name, nodes)}
    complete = sorted(map(_step, on_all - in_doubt))
    newest = max(complete, default=-1)
    # Older partial steps were complete once: the nodes do not remove old steps at the same moment.
    partial = {name for name in names - (on_all - in_doubt) if _step(name) > newest}
    damaged = {name: reason for node in nodes for name, reason in node.skipped.items()}
    skipped = {name: _why_partial(name, nodes) for name in partial} | damaged
    lost = bool(damaged or partial & in_doubt) or any(_step(name) <= announced_step for name in partial)
    return Inventory(complete, dict(sorted(skipped.items())), lost)


def _save_ids(name: str, nodes: Sequence[NodeInventory]) -> set[str | None]:
    """Return the save ids of the parts in the directories called ``name``, and None if a node lacks the directory."""
    parts = [node.intact.get(name) for node in nodes]
    return {None if part is None else part.save_id for part in parts}


def _lacks_parts(name: str, nodes: Sequence[NodeInventory]) -> bool:
    """Return whether some of the nodes that saved this step are absent. Every present node has a part."""
    parts = [node.intact[name] for node in nodes]
    return len({part.node for part in parts}) < parts[0].nodes


def _why_partial(name: str, nodes: Sequence[NodeInventory]) -> str:
    having = [f"{number} ({node.host})" for number, node in enumerate(nodes) if name in node.intact]
    if len(having) < len(nodes):
        return f"of {len(nodes)} nodes, only these have it: {', '.join(having)}"
    if len(_save_ids(name, nodes)) > 1:
        return "the nodes have parts of different saves"
    saved_by = nodes[0].intact[name].nodes
    return f"{saved_by} nodes saved it, some of them are absent, and no tracker names it: they may lack their parts"


def _step(name: str) -> int:
    step = step_of(name)
    assert step is not None, "find_checkpoints returns directories of steps only"
    return step
