"""Process groups and the key-value store that processes meet at."""

from torch._C._distributed_c10d import Store as Store

from hwrl.comm.group import Comm as Comm
from hwrl.comm.group import Group as Group
from hwrl.comm.group import Pending as Pending
from hwrl.comm.group import ReduceOp as ReduceOp
from hwrl.comm.group import forget_group as forget_group
from hwrl.comm.group import raw_bytes as raw_bytes
from hwrl.comm.store import await_keys as await_keys
from hwrl.comm.store import clone_store as clone_store
from hwrl.comm.store import connect_store as connect_store
from hwrl.comm.store import serve_store as serve_store
from hwrl.comm.store import store_address as store_address
from hwrl.comm.store import store_failures as store_failures
