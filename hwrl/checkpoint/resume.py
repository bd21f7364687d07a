"""Find the newest resumable checkpoint and load it: :func:`load_newest`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from hwrl.checkpoint.nodes import Inventory, SharedDirectory
from hwrl.checkpoint.parts import make_template, restore
from hwrl.errors import CheckpointCorruptError, CheckpointNotFoundError
from hwrl.interfaces import Backend

_log = logging.getLogger(__name__)


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


def load_newest(
    shared: SharedDirectory, inventory: Inventory, state: dict[str, Any], *, step: int | None, backend: Backend
) -> Resumed | None:
    """Load the newest resumable checkpoint, or exactly ``step``, into ``state`` and its objects.

    All ranks do it together. Return None if no step is complete and none is lost.
    """
    skipped = [Skipped(shared.path / name, reason) for name, reason in inventory.skipped.items()]
    for item in skipped:
        _log.warning("skipping %s: %s", item.path, item.reason)
    candidates = inventory.complete[::-1]
    if step is not None:
        _require(step, shared.path, inventory)
        candidates, skipped = [step], []
    for candidate in candidates:
        path = shared.path / step_name(candidate)
        reason = _find_damage(shared, path)
        if reason is None:
            return _load(shared, path, state, skipped, backend)
        _log.warning("skipping %s: %s", path, reason)
        skipped.append(Skipped(path, reason))
        shared.damaged.add(path)
    if not candidates and not inventory.lost:
        return None
    if step is not None:
        raise corrupt_error(skipped[0].path, skipped[0].reason)
    raise CheckpointNotFoundError(
        f"no checkpoint in {shared.path} can be resumed",
        why="; ".join(f"{item.path.name}: {item.reason}" for item in skipped),
        fix="restore one of them from a copy, or start in an empty directory",
    )


def _require(step: int, directory: Path, inventory: Inventory) -> None:
    if (name := step_name(step)) in inventory.skipped:
        raise corrupt_error(directory / name, inventory.skipped[name])
    if step not in inventory.complete:
        raise CheckpointNotFoundError(
            f"there is no complete checkpoint for step {step} in {directory}",
            why=f"the complete steps are {inventory.complete}",
            fix="choose one of these, or omit the step to load the newest",
        )


def _find_damage(shared: SharedDirectory, path: Path) -> str | None:
    """Return why the checkpoint in ``path`` is damaged, or None. The ranks of a node divide its files."""
    with shared.agreement.round() as ranks:
        damage = None
        try:
            info = inspect_checkpoint(path)
            verify_files(
                info, sorted(info.manifest.files)[shared.ranks.index(shared.agreement.rank) :: len(shared.ranks)]
            )
        except CheckpointCorruptError as exc:
            damage = exc.why
        found: str | None = ranks.broadcast(next(filter(None, ranks.gather(damage) or []), None))
    return found


def _load(
    shared: SharedDirectory, path: Path, state: dict[str, Any], skipped: list[Skipped], backend: Backend
) -> Resumed:
    """Load ``path``. No rank begins to load before the states of all ranks have been checked."""
    with torch.device("cpu"):  # torch's reader must not allocate on the caller's default device
        with shared.agreement.round() as ranks:
            info = inspect_checkpoint(path)
            saved = SavedTensors(info)
            template = make_template(state, saved)
            load = saved.plan(template)
            answers = ranks.gather([shared.node, load.unwanted])
            if answers is not None:
                require_all_wanted(answers)
        with shared.agreement.round(), backend.allocating("the checkpoint"):
            load.run()
    restore(state, template)
    return Resumed(info, *read_extra(info), skipped)
