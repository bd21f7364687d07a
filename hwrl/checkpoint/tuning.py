"""Sizes and time limits of a save: :class:`SaveTuning`."""

from __future__ import annotations

from dataclasses import dataclass

from hwrl.checkpoint.split import MAX_ITEM_NBYTES


@dataclass(frozen=True)
class SaveTuning:
    """Sizes and time limits of a save. Keep the defaults; tests use smaller values to reach every branch."""

    max_item_nbytes: int = MAX_ITEM_NBYTES
    """The largest item. Larger tensors are split. A thread of a save reads one item at a time, and so does a load.

    A copy to staging memory is made of whole tensors.
    """
    max_files: int = 4
    """The most tensor files of one rank. One thread writes and hashes each file, mostly without the GIL."""
    min_file_nbytes: int = 64 << 20
    """A rank writes fewer files than ``max_files`` if its files would be smaller than this."""
    clone_batch_nbytes: int = 512 << 20
    """Copies on the device are allocated and freed in batches of this size: each allocation takes milliseconds."""
    look_s: float = 2.0
    """How long a rank looks for the marker files of the other ranks. A network file system may show a new file late."""
