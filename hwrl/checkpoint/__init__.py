"""Checkpoints that a crash cannot corrupt: see ``docs/checkpoints.md`` for the protocol and its promises."""

from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.format.manifest import CheckpointInfo, Manifest, Skipped, find_checkpoints
from hwrl.checkpoint.format.shards import LocalShards
from hwrl.checkpoint.manager import CheckpointManager, Resumed, SaveReport
from hwrl.checkpoint.saving.copy import copy_for_torch

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "DurableFS",
    "FileRecord",
    "LocalShards",
    "Manifest",
    "Resumed",
    "SaveReport",
    "Skipped",
    "copy_for_torch",
    "find_checkpoints",
]
