"""What the disks hold, of one node or of all: which checkpoints are complete, and what only looks like one."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory
from hwrl.checkpoint.format.manifest import find_checkpoints, step_of


@dataclass(frozen=True)
class Survey:
    """The steps that are complete on every node, oldest first, and why other directories, by name, are not.

    ``lost`` says whether one of those others may have been complete: it is false where some nodes committed a first
    step and none announced it, so that nobody was ever told of it.
    """

    complete: list[int]
    skipped: dict[str, str]
    lost: bool

    @property
    def newest(self) -> int:
        """The newest complete step, -1 if there is none."""
        return max(self.complete, default=-1)

    def uncommitted(self, home: CheckpointDirectory) -> list[Path]:
        """Return what ``home`` has complete, and newer than what all nodes have."""
        return [info.path for info in home.complete() if info.step > self.newest]


def look(home: CheckpointDirectory, *, without: Collection[Path] = ()) -> dict[str, Any]:
    """Return what one node has, as JSON; ``without`` are checkpoints that are not to be trusted."""
    complete, skipped = find_checkpoints(home.directory)
    return {
        "host": socket.gethostname(),
        "complete": {info.path.name: info.manifest.save_id for info in complete if info.path not in without},
        "skipped": {one.path.name: one.reason for one in skipped},
        "announced": home.announced,
    }


def merge(views: Sequence[dict[str, Any]]) -> Survey:
    """Return what all nodes have, from what each :func:`look` returned: complete is what is of the same save on all."""
    holders = {name: [node for node, view in enumerate(views) if name in view["complete"]] for name in _names(views)}
    same = {name for name in holders if len({view["complete"].get(name) for view in views}) == 1}
    newest = max(map(_step, same), default=-1)
    # One that is older was complete, and is being removed by each node in its turn.
    partial = {name: nodes for name, nodes in holders.items() if name not in same and _step(name) > newest}
    skipped = {name: _why_partial(views, nodes) for name, nodes in partial.items()}
    damaged = {name: reason for view in views for name, reason in view["skipped"].items()}
    announced = max(view["announced"] for view in views)
    lost = bool(damaged) or any(_step(name) <= announced for name in partial)
    return Survey(sorted(map(_step, same)), dict(sorted((skipped | damaged).items())), lost)


def _names(views: Sequence[dict[str, Any]]) -> set[str]:
    return {name for view in views for name in view["complete"]}


def _why_partial(views: Sequence[dict[str, Any]], nodes: Sequence[int]) -> str:
    if len(nodes) == len(views):
        return "the nodes have it of different saves"
    having = ", ".join(f"{node} ({views[node]['host']})" for node in nodes)
    return f"of {len(views)} nodes only {having} have it"


def _step(name: str) -> int:
    step = step_of(name)
    assert step is not None, "find_checkpoints found it"
    return step
