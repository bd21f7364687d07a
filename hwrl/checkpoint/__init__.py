"""Crash-safe checkpoints. ``docs/checkpoints.md`` has the protocol and the promises.

Each name is imported on first use. So the driver of a run can find and lock checkpoints without importing
``torch.distributed.checkpoint``, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_face

if TYPE_CHECKING:
    from hwrl.checkpoint.directory import TRACKER_NAME as TRACKER_NAME
    from hwrl.checkpoint.directory import CheckpointDirectory as CheckpointDirectory
    from hwrl.checkpoint.directory import broken_checkpoints as broken_checkpoints
    from hwrl.checkpoint.directory import unfinished_saves as unfinished_saves
    from hwrl.checkpoint.durable import DurableFS as DurableFS
    from hwrl.checkpoint.durable import FileRecord as FileRecord
    from hwrl.checkpoint.export import copy_for_torch as copy_for_torch
    from hwrl.checkpoint.export import join_parts as join_parts
    from hwrl.checkpoint.load import SavedTensors as SavedTensors
    from hwrl.checkpoint.load import read_tensors as read_tensors
    from hwrl.checkpoint.lock import DirectoryLock as DirectoryLock
    from hwrl.checkpoint.lock import find_owner as find_owner
    from hwrl.checkpoint.lock import read_lock as read_lock
    from hwrl.checkpoint.lock import share_lock as share_lock
    from hwrl.checkpoint.manager import CheckpointManager as CheckpointManager
    from hwrl.checkpoint.manager import SaveReport as SaveReport
    from hwrl.checkpoint.manifest import EXTRA_NAME as EXTRA_NAME
    from hwrl.checkpoint.manifest import CheckpointInfo as CheckpointInfo
    from hwrl.checkpoint.manifest import Manifest as Manifest
    from hwrl.checkpoint.manifest import Skipped as Skipped
    from hwrl.checkpoint.manifest import corrupt_error as corrupt_error
    from hwrl.checkpoint.manifest import find_checkpoints as find_checkpoints
    from hwrl.checkpoint.manifest import hold_for_reading as hold_for_reading
    from hwrl.checkpoint.manifest import read_extra as read_extra
    from hwrl.checkpoint.manifest import step_name as step_name
    from hwrl.checkpoint.manifest import verify_files as verify_files
    from hwrl.checkpoint.parts import parameter_names as parameter_names
    from hwrl.checkpoint.parts import rng_state as rng_state
    from hwrl.checkpoint.parts import set_rng_state as set_rng_state
    from hwrl.checkpoint.resume import Resumed as Resumed
    from hwrl.checkpoint.shards import LocalShards as LocalShards
    from hwrl.checkpoint.staging import SaveTuning as SaveTuning

__getattr__, __dir__, __all__ = lazy_face(__name__)
