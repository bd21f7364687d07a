"""Checkpoints that no crash can corrupt. ``docs/checkpoints.md`` has the protocol and the promises."""

from hwrl.checkpoint.directory.checkpoint_directory import TRACKER_NAME, CheckpointDirectory
from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.directory.lock import DirectoryLock, find_owner
from hwrl.checkpoint.format.copies import copy_for_torch
from hwrl.checkpoint.format.layout import read_tensors
from hwrl.checkpoint.format.manifest import (
    EXTRA_NAME,
    CheckpointInfo,
    Manifest,
    Skipped,
    find_checkpoints,
    in_use,
    read_extra,
    verify_files,
)
from hwrl.checkpoint.format.shards import LocalShards
from hwrl.checkpoint.join import join_parts
from hwrl.checkpoint.manager import CheckpointManager, Resumed, SaveReport

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
    "Skipped",
    "copy_for_torch",
    "find_checkpoints",
    "find_owner",
    "in_use",
    "join_parts",
    "read_extra",
    "read_tensors",
    "verify_files",
]
