"""Host memory that is kept, and device memory that is given back: see ``docs/memory.md``."""

from hwrl.memory.offload import Moved, Offloader, Transfer
from hwrl.memory.pool import PinnedPool

__all__ = ["Moved", "Offloader", "PinnedPool", "Transfer"]
