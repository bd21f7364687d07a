"""Host memory that is kept, and device memory that is given back: see ``docs/memory.md``."""

from hwrl.interfaces import Moved, Transfer
from hwrl.memory.lending import HostCopies, HostCopy
from hwrl.memory.offload import Offloader
from hwrl.memory.pool import PinnedPool

__all__ = ["HostCopies", "HostCopy", "Moved", "Offloader", "PinnedPool", "Transfer"]
