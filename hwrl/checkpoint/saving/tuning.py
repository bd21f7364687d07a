"""Sizes and times of a save: :class:`SaveTuning`."""

from __future__ import annotations

from dataclasses import dataclass

from hwrl.checkpoint.format.split import MAX_ITEM_NBYTES


@dataclass(frozen=True)
class SaveTuning:
    """Sizes and times of a save. Programs keep the defaults; tests use smaller ones, to take every path."""

    item_nbytes: int = MAX_ITEM_NBYTES
    """The most to read from the device, or by a load, at once. Larger tensors are saved in pieces."""
    max_files: int = 4
    """Files of tensors for each rank. A thread writes and hashes each; both release the interpreter's lock."""
    min_file_nbytes: int = 64 << 20
    """A rank with fewer bytes for each file writes fewer files."""
    clone_batch_nbytes: int = 512 << 20
    """Device memory is allocated, and freed, in batches of this size: each allocation takes milliseconds."""
    look_s: float = 2.0
    """How long a rank looks for the files of ranks on other nodes. A network file system may show new files late."""
