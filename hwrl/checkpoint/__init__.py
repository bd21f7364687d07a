"""Checkpoints that a crash cannot corrupt: see ``docs/checkpoints.md`` for the protocol and its promises."""

from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.manager import CheckpointManager, Resumed, SaveReport
from hwrl.checkpoint.manifest import CheckpointInfo, Manifest, Skipped, find_checkpoints

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "DurableFS",
    "FileRecord",
    "Manifest",
    "Resumed",
    "SaveReport",
    "Skipped",
    "find_checkpoints",
]
