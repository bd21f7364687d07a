"""Offloading of models to host memory, and page-locked host memory: see ``docs/memory.md``."""

from hwrl.interfaces import Moved as Moved
from hwrl.interfaces import Transfer as Transfer
from hwrl.memory.fingerprint import bytes_of as bytes_of
from hwrl.memory.lending import HostCopies as HostCopies
from hwrl.memory.lending import HostCopy as HostCopy
from hwrl.memory.offload import Offloader as Offloader
from hwrl.memory.pool import PageLocked as PageLocked
from hwrl.memory.pool import PinnedPool as PinnedPool
from hwrl.memory.storages import own_memory as own_memory
