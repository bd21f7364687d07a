"""Checkpoints that a crash cannot corrupt: see ``docs/checkpoints.md`` for the protocol and its promises."""

from hwrl.checkpoint.copy import copy_for_torch
from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.manager import CheckpointManager, Resumed, SaveReport
from hwrl.checkpoint.manifest import CheckpointInfo, Manifest, Skipped, find_checkpoints
from hwrl.checkpoint.pieces import Pieces

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "DurableFS",
    "FileRecord",
    "Manifest",
    "Pieces",
    "Resumed",
    "SaveReport",
    "Skipped",
    "copy_for_torch",
    "find_checkpoints",
]
