"""Offloading of models to host memory, and page-locked host memory: see ``docs/memory.md``."""

from hwrl.interfaces import Moved, Transfer
from hwrl.memory.fingerprint import bytes_of
from hwrl.memory.lending import HostCopies, HostCopy
from hwrl.memory.offload import Offloader
from hwrl.memory.pagelock import PageLocked
from hwrl.memory.pool import PinnedPool
from hwrl.memory.storages import own_memory

__all__ = [
    "HostCopies",
    "HostCopy",
    "Moved",
    "Offloader",
    "PageLocked",
    "PinnedPool",
    "Transfer",
    "bytes_of",
    "own_memory",
]
