"""Crash-safe checkpoints. ``docs/checkpoints.md`` has the protocol and the promises."""

from hwrl.checkpoint.directory.checkpoint_directory import (
    TRACKER_NAME,
    CheckpointDirectory,
    broken_checkpoints,
    has_saves,
    unfinished_saves,
)
from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.directory.lock import DirectoryLock, find_owner
from hwrl.checkpoint.format.copies import copy_for_torch
from hwrl.checkpoint.format.loading import read_tensors
from hwrl.checkpoint.format.manifest import (
    EXTRA_NAME,
    CheckpointInfo,
    Manifest,
    Skipped,
    corrupt_error,
    find_checkpoints,
    hold_for_reading,
    read_extra,
    step_name,
    verify_files,
)
from hwrl.checkpoint.format.shards import LocalShards
from hwrl.checkpoint.join import join_parts
from hwrl.checkpoint.manager import CheckpointManager, SaveReport
from hwrl.checkpoint.resume import Resumed
from hwrl.checkpoint.saving.tuning import SaveTuning

__all__ = [
    "EXTRA_NAME",
    "TRACKER_NAME",
    "CheckpointDirectory",
    "CheckpointInfo",
    "CheckpointManager",
    "DirectoryLock",
    "DurableFS",
    "FileRecord",
    "LocalShards",
    "Manifest",
    "Resumed",
    "SaveReport",
    "SaveTuning",
    "Skipped",
    "broken_checkpoints",
    "copy_for_torch",
    "corrupt_error",
    "find_checkpoints",
    "find_owner",
    "has_saves",
    "hold_for_reading",
    "join_parts",
    "read_extra",
    "read_tensors",
    "step_name",
    "unfinished_saves",
    "verify_files",
]
