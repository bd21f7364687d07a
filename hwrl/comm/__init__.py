"""Process groups, and the key-value store where processes meet."""

from torch._C._distributed_c10d import HashStore, Store

from hwrl.comm.factory import Comm, call_off_group, forget_group
from hwrl.comm.group import TorchGroup
from hwrl.comm.sockets import process_sockets, reachable_host
from hwrl.comm.staged import collectives_of
from hwrl.comm.store import (
    PrefixStore,
    await_keys,
    clone_store,
    connect_store,
    is_on_loopback,
    serve_store,
    store_address,
    store_failures,
)
from hwrl.comm.tensors import raw_bytes
from hwrl.interfaces import Group, Pending, ReduceOp

__all__ = [
    "Comm",
    "Group",
    "HashStore",
    "Pending",
    "PrefixStore",
    "ReduceOp",
    "Store",
    "TorchGroup",
    "await_keys",
    "call_off_group",
    "clone_store",
    "collectives_of",
    "connect_store",
    "forget_group",
    "is_on_loopback",
    "process_sockets",
    "raw_bytes",
    "reachable_host",
    "serve_store",
    "store_address",
    "store_failures",
]
