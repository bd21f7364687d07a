"""The stages of a save on one rank, and the messages that the ranks exchange between the stages.

The stages are captured, agreed, planned, written, committed. Each is made from the stage before it. They share one
captured state, which is released when this rank's files are written.

Two kinds of leaders occur. Rank 0 leads all ranks. The node leader leads the ranks of one node: see
:class:`~hwrl.checkpoint.nodes.Node`. Rank 0 is also the leader of its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch.distributed.checkpoint.planner import WriteItem

from hwrl.checkpoint.agreement import Message
from hwrl.checkpoint.durable import FileRecord
from hwrl.checkpoint.inventory import Inventory, NodeInventory
from hwrl.checkpoint.layout import Json
from hwrl.checkpoint.load import SavedTensors
from hwrl.checkpoint.manifest import CheckpointInfo, Manifest
from hwrl.checkpoint.state import CapturedState, ItemPlan

Export = Callable[[Path, SavedTensors], object]
"""The caller's function that writes files for other readers: it gets an empty directory and the saved tensors."""
AfterCommit = Callable[[CheckpointInfo], object]
"""The caller's function that runs when the checkpoint is complete."""

# -- stages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedSave:
    """The arguments of ``save``, with the captured state. ``call`` is the number of the call, the same on all ranks.

    ``has_pending_error`` says that this call of ``save`` will raise the error of the previous save. If that is so on
    every rank, nothing is saved. If another rank has no pending error, it had none, or it raised it in an earlier call.
    Then all ranks save this step in the background, and on this rank ``save`` raises the pending error at once.
    """

    call: int
    step: int
    weight_version: int
    state: CapturedState
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    export: Export | None
    after_commit: AfterCommit | None
    has_pending_error: bool


@dataclass(frozen=True)
class AgreedSave:
    """All ranks have agreed to save this step. ``draft`` is the directory to write; its name contains ``save_id``.

    On rank 0, ``extra`` is the extra state of all ranks. On the other ranks it is None, because it may be too large to
    send to every rank.
    """

    captured: CapturedSave
    save_id: str
    draft: Path
    inventory: Inventory
    extra: ExtraState | None


@dataclass(frozen=True)
class PlannedSave:
    """This rank has its share of the work: it writes ``items``, which are some of the items in ``plan``.

    ``extra`` is the extra state of all ranks on node leaders, and None on other ranks.
    """

    agreed: AgreedSave
    plan: ItemPlan
    items: list[WriteItem]
    extra: ExtraState | None


@dataclass(frozen=True)
class WrittenSave:
    """Every file of this rank's node is durable in ``draft``, including the manifest.

    ``manifest`` is None except on node leaders.
    """

    captured: CapturedSave
    draft: Path
    manifest: Manifest | None


@dataclass(frozen=True)
class CommittedSave:
    """This rank has committed: a node leader has given the draft its final name, and other ranks do nothing.

    When all ranks reach this stage, the step is complete.
    """

    captured: CapturedSave
    manifest: Manifest | None


# -- messages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveRequest(Message):
    """What one rank wants to save. ``inventory`` is the inventory of its node, and None except on node leaders."""

    step: int
    has_pending_error: bool
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    inventory: NodeInventory | None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        inventory = fields["inventory"]
        return cls(**fields | {"inventory": None if inventory is None else NodeInventory.from_json(inventory)})


@dataclass(frozen=True)
class SaveDecision(Message):
    """What all ranks do now. ``save_id`` is the id of their save, or None if nothing is saved: see `CapturedSave`."""

    save_id: str | None
    inventory: Inventory

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(fields["save_id"], Inventory.from_json(fields["inventory"]))


@dataclass(frozen=True)
class ExtraState(Message):
    """The content of ``extra.json``: the ``extra`` of rank 0, and the ``rank_extra`` of each rank."""

    all: Mapping[str, Any]
    ranks: list[Mapping[str, Any]]


@dataclass(frozen=True)
class RankPlan(Message):
    """All items that one rank could write, encoded."""

    items: list[Json]


@dataclass(frozen=True)
class Assignment(Message):
    """Which rank of a node writes which items: for each rank, positions in its own plan."""

    positions: list[list[int]]


@dataclass(frozen=True)
class RankFiles(Message):
    """The files that one rank has written: their entries for the layout, and their records by name."""

    entries: list[Json]
    files: Mapping[str, FileRecord]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(fields["entries"], {name: FileRecord(**record) for name, record in fields["files"].items()})
