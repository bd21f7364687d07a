"""The stages of a save on one rank, and the messages between ranks.

Each stage is immutable, and made from the one before: captured, agreed, planned, written, committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch.distributed.checkpoint.planner import WriteItem

from hwrl.checkpoint.directory.durable import FileRecord
from hwrl.checkpoint.format.layout import Json
from hwrl.checkpoint.format.loading import SavedTensors
from hwrl.checkpoint.format.manifest import CheckpointInfo, Manifest
from hwrl.checkpoint.saving.agreement import Message
from hwrl.checkpoint.saving.inventory import Inventory, NodeInventory
from hwrl.checkpoint.saving.state import CapturedState, ItemPlan

Export = Callable[[Path, SavedTensors], object]
"""Writes files for other readers into an empty directory, from the saved tensors."""
AfterCommit = Callable[[CheckpointInfo], object]
"""Is told about a complete checkpoint."""

# -- stages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedSave:
    """The arguments of ``save``, with the state held. ``call`` is the number of the call, equal on all ranks.

    ``previous_save_succeeded`` is False if this rank will raise the previous save's failure. It then saves only if some
    other rank has True.
    """

    call: int
    step: int
    weight_version: int
    state: CapturedState
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    export: Export | None
    after_commit: AfterCommit | None
    previous_save_succeeded: bool


@dataclass(frozen=True)
class AgreedSave:
    """All ranks save this step. ``draft`` is the directory to write, named after ``save_id``.

    ``extra`` is the extra state of all ranks on the first rank, and None on the others: it may be too large to send
    to every rank.
    """

    captured: CapturedSave
    save_id: str
    draft: Path
    inventory: Inventory
    extra: ExtraState | None


@dataclass(frozen=True)
class PlannedSave:
    """``items`` of ``plan`` are written by this rank. ``extra`` is there on the first rank of each node."""

    agreed: AgreedSave
    plan: ItemPlan
    items: list[WriteItem]
    extra: ExtraState | None


@dataclass(frozen=True)
class WrittenSave:
    """All files of this rank's node are durable in ``draft``, the manifest among them.

    ``manifest`` is there on the first rank of each node.
    """

    captured: CapturedSave
    draft: Path
    manifest: Manifest | None


@dataclass(frozen=True)
class CommittedSave:
    """The draft of this rank's node has its final name. When all ranks are here, the step is complete."""

    captured: CapturedSave
    manifest: Manifest | None


# -- messages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveRequest(Message):
    """What each rank wants to save. ``inventory`` is its node's, from the first rank of each node."""

    step: int
    previous_save_succeeded: bool
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    inventory: NodeInventory | None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        inventory = fields["inventory"]
        return cls(**fields | {"inventory": None if inventory is None else NodeInventory.from_json(inventory)})


@dataclass(frozen=True)
class SaveOrder(Message):
    """The save of all ranks. ``save_id`` is None if every rank raises its previous failure: nothing is saved."""

    save_id: str | None
    inventory: Inventory

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(fields["save_id"], Inventory.from_json(fields["inventory"]))


@dataclass(frozen=True)
class ExtraState(Message):
    """The content of ``extra.json``: the first rank's ``extra``, and each rank's ``rank_extra``."""

    all: Mapping[str, Any]
    ranks: list[Mapping[str, Any]]


@dataclass(frozen=True)
class RankPlan(Message):
    """The items of one rank's plan, encoded."""

    items: list[Json]


@dataclass(frozen=True)
class Assignment(Message):
    """The items to write, for each rank of a node, as positions in the rank's plan."""

    positions: list[list[int]]


@dataclass(frozen=True)
class RankFiles(Message):
    """One rank's files: their entries in the layout, and their records by name."""

    entries: list[Json]
    files: Mapping[str, FileRecord]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields."""
        return cls(fields["entries"], {name: FileRecord(**record) for name, record in fields["files"].items()})
