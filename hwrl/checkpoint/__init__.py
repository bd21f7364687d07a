"""Crash-safe checkpoints. ``docs/checkpoints.md`` has the protocol and the promises.

Each name is imported on first use. So the driver of a run can find and lock checkpoints without importing
``torch.distributed.checkpoint``, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.checkpoint.directory import (
        TRACKER_NAME,
        CheckpointDirectory,
        broken_checkpoints,
        has_saves,
        unfinished_saves,
    )
    from hwrl.checkpoint.durable import DurableFS, FileRecord
    from hwrl.checkpoint.export import copy_for_torch
    from hwrl.checkpoint.join import join_parts
    from hwrl.checkpoint.load import SavedTensors, read_tensors
    from hwrl.checkpoint.lock import DirectoryLock, find_owner, read_lock, share_lock
    from hwrl.checkpoint.manager import CheckpointManager, SaveReport
    from hwrl.checkpoint.manifest import (
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
    from hwrl.checkpoint.parts import parameter_names
    from hwrl.checkpoint.resume import Resumed
    from hwrl.checkpoint.rng import rng_state, set_rng_state
    from hwrl.checkpoint.shards import LocalShards
    from hwrl.checkpoint.staging import SaveTuning

_NAMES = {
    "directory": ["CheckpointDirectory", "TRACKER_NAME", "broken_checkpoints", "has_saves", "unfinished_saves"],
    "durable": ["DurableFS", "FileRecord"],
    "export": ["copy_for_torch"],
    "join": ["join_parts"],
    "load": ["SavedTensors", "read_tensors"],
    "lock": ["DirectoryLock", "find_owner", "read_lock", "share_lock"],
    "manager": ["CheckpointManager", "SaveReport"],
    "manifest": [
        "CheckpointInfo",
        "EXTRA_NAME",
        "Manifest",
        "Skipped",
        "corrupt_error",
        "find_checkpoints",
        "hold_for_reading",
        "read_extra",
        "step_name",
        "verify_files",
    ],
    "parts": ["parameter_names"],
    "resume": ["Resumed"],
    "rng": ["rng_state", "set_rng_state"],
    "shards": ["LocalShards"],
    "staging": ["SaveTuning"],
}

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
    "SavedTensors",
    "Skipped",
    "broken_checkpoints",
    "copy_for_torch",
    "corrupt_error",
    "find_checkpoints",
    "find_owner",
    "has_saves",
    "hold_for_reading",
    "join_parts",
    "parameter_names",
    "read_extra",
    "read_lock",
    "read_tensors",
    "rng_state",
    "set_rng_state",
    "share_lock",
    "step_name",
    "unfinished_saves",
    "verify_files",
]

__getattr__, __dir__ = lazy_names(__name__, {name: module for module, names in _NAMES.items() for name in names})
