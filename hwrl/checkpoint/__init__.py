"""Crash-safe checkpoints. ``docs/checkpoints.md`` has the protocol and the promises.

Each name is imported on first use. So the driver of a run can find and lock checkpoints without importing
``torch.distributed.checkpoint``, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.checkpoint.directory.checkpoint_directory import (
        TRACKER_NAME,
        CheckpointDirectory,
        broken_checkpoints,
        has_saves,
        unfinished_saves,
    )
    from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
    from hwrl.checkpoint.directory.lock import DirectoryLock, find_owner, read_lock, share_lock
    from hwrl.checkpoint.format.copies import copy_for_torch
    from hwrl.checkpoint.format.loading import SavedTensors, read_tensors
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
    from hwrl.checkpoint.parts import parameter_names
    from hwrl.checkpoint.resume import Resumed
    from hwrl.checkpoint.rng import rng_state, set_rng_state
    from hwrl.checkpoint.saving.tuning import SaveTuning

_MODULE_OF = {
    "EXTRA_NAME": "format.manifest",
    "TRACKER_NAME": "directory.checkpoint_directory",
    "CheckpointDirectory": "directory.checkpoint_directory",
    "CheckpointInfo": "format.manifest",
    "CheckpointManager": "manager",
    "DirectoryLock": "directory.lock",
    "DurableFS": "directory.durable",
    "FileRecord": "directory.durable",
    "LocalShards": "format.shards",
    "Manifest": "format.manifest",
    "Resumed": "resume",
    "SaveReport": "manager",
    "SaveTuning": "saving.tuning",
    "SavedTensors": "format.loading",
    "Skipped": "format.manifest",
    "broken_checkpoints": "directory.checkpoint_directory",
    "copy_for_torch": "format.copies",
    "corrupt_error": "format.manifest",
    "find_checkpoints": "format.manifest",
    "find_owner": "directory.lock",
    "has_saves": "directory.checkpoint_directory",
    "hold_for_reading": "format.manifest",
    "join_parts": "join",
    "parameter_names": "parts",
    "read_extra": "format.manifest",
    "read_lock": "directory.lock",
    "read_tensors": "format.loading",
    "rng_state": "rng",
    "set_rng_state": "rng",
    "share_lock": "directory.lock",
    "step_name": "format.manifest",
    "unfinished_saves": "directory.checkpoint_directory",
    "verify_files": "format.manifest",
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

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
