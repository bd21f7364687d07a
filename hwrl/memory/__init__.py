"""Host memory that is kept, and device memory that is given back: see ``docs/memory.md``."""

from hwrl.memory.lending import HostCopy
from hwrl.memory.offload import Moved, Offloader, Transfer
from hwrl.memory.pool import PinnedPool

__all__ = ["HostCopy", "Moved", "Offloader", "PinnedPool", "Transfer"]
