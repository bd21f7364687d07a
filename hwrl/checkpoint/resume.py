"""Find the newest resumable checkpoint and load it: :class:`Resumer`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # the planner uses the same names

from hwrl.checkpoint.agreement import Agreement, Message
from hwrl.checkpoint.inventory import Inventory
from hwrl.checkpoint.load import SavedTensors, require_all_wanted
from hwrl.checkpoint.manifest import (
    CheckpointInfo,
    Skipped,
    corrupt_error,
    inspect_checkpoint,
    read_extra,
    step_name,
    verify_files,
)
from hwrl.checkpoint.nodes import Node
from hwrl.checkpoint.planners import duplicate_names_as
from hwrl.checkpoint.state import require_storage
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from hwrl.interfaces import Backend

_log = logging.getLogger(__name__)

MakeState = Callable[[SavedTensors], dict[str, Any]]
"""Returns the state to load a checkpoint into."""


@dataclass(frozen=True)
class Resumed:
    """The result of ``resume``: the loaded checkpoint, and its extra state.

    ``rank_extras`` has the ``rank_extra`` of each rank of the save. ``skipped`` has the directories that could not be
    resumed: newer ones that are incomplete or have a wrong hash, and all with an invalid manifest, a missing file or a
    wrong size. The hashes of older checkpoints are not checked. A reason may be about another node's disk. If one step
    was requested, ``skipped`` is empty.
    """

    info: CheckpointInfo
    extra: dict[str, Any]
    rank_extras: list[dict[str, Any]]
    skipped: list[Skipped]

    @property
    def step(self) -> int:
        """The loaded step."""
        return self.info.step


@dataclass(frozen=True)
class _Damage(Message):
    """Why a checkpoint is damaged, according to one rank; None if this rank found no damage."""

    reason: str | None


@dataclass(frozen=True)
class _UnwantedNames(Message):
    """Names in the checkpoint of ``node``, but not in one rank's state."""

    node: int
    names: list[str]


@dataclass(frozen=True)
class Resumer:
    """Loads checkpoints from the directory ``path``. All ranks of ``agreement`` do it together.

    Checkpoints that fail the verification are added to ``failed_verification``: a hash is wrong, or a file cannot be
    read. ``Saver`` shares this list. On node leaders, its next save puts these checkpoints aside and empties the list.
    """

    path: Path
    agreement: Agreement
    node: Node
    backend: Backend
    failed_verification: list[Path]

    def resume(self, make_state: MakeState, inventory: Inventory, *, step: int | None) -> Resumed | None:
        """Load the newest resumable checkpoint, or exactly ``step``, into the state that ``make_state`` returns.

        Return None if no step is complete and none is lost.
        """
        skipped = [Skipped(self.path / name, reason) for name, reason in inventory.skipped.items()]
        for item in skipped:
            _log.warning("skipping %s: %s", item.path, item.reason)
        candidates = inventory.complete[::-1]
        if step is not None:
            candidates, skipped = [self._require(step, inventory)], []
        for candidate in candidates:
            path = self.path / step_name(candidate)
            reason = self._find_damage(path)
            if reason is None:
                return self._load(path, make_state, skipped)
            _log.warning("skipping %s: %s", path, reason)
            skipped.append(Skipped(path, reason))
            self.failed_verification.append(path)
        if not candidates and not inventory.lost:
            return None
        if step is not None:
            raise corrupt_error(skipped[0].path, skipped[0].reason)
        raise CheckpointNotFoundError(
            f"no checkpoint in {self.path} can be resumed",
            why="; ".join(f"{item.path.name}: {item.reason}" for item in skipped),
            fix="restore one of them from a copy, or start in an empty directory",
        )

    def _require(self, step: int, inventory: Inventory) -> int:
        if step in inventory.complete:
            return step
        if (name := step_name(step)) in inventory.skipped:
            raise corrupt_error(self.path / name, inventory.skipped[name])
        raise CheckpointNotFoundError(
            f"there is no complete checkpoint for step {step} in {self.path}",
            why=f"the complete steps are {inventory.complete}",
            fix="choose one of these, or omit the step to load the newest",
        )

    def _find_damage(self, path: Path) -> str | None:
        """Return why the checkpoint in ``path`` is damaged, or None. The ranks of a node divide its files."""
        with self.agreement.round() as ranks:
            answers = ranks.gather(_Damage(self._damage_in_share(path)))
            first = None
            if answers is not None:
                first = next((answer for answer in answers if answer.reason is not None), _Damage(None))
            return ranks.broadcast(first, _Damage).reason

    def _damage_in_share(self, path: Path) -> str | None:
        """Verify this rank's share of the files in its node's part. Return the damage, or None."""
        try:
            info = inspect_checkpoint(path)
            names = sorted(info.manifest.files)
            verify_files(info, names[self.node.rank :: len(self.node.agreement.ranks)])
        except CheckpointCorruptError as exc:
            return exc.why
        return None

    def _load(self, path: Path, make_state: MakeState, skipped: list[Skipped]) -> Resumed:
        """Load ``path``. No rank begins to load before the states of all ranks have been checked."""
        with torch.device("cpu"):  # torch's reader must not allocate on the caller's default device
            with self.agreement.round() as ranks:
                info = inspect_checkpoint(path)
                saved = SavedTensors(info)
                state = make_state(saved)
                with duplicate_names_as(CheckpointError):
                    require_storage(flatten_state_dict(state)[0])
                load = saved.plan(state)
                answers = ranks.gather(_UnwantedNames(self.node.number, load.unwanted))
                if answers is not None:
                    require_all_wanted([(answer.node, answer.names) for answer in answers])
            with self.agreement.vote(), self.backend.allocating("the checkpoint"):
                load.run()
        return Resumed(info, *read_extra(info), skipped)
