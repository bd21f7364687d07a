"""Process groups, and the key-value store where processes meet."""

from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import Store as Store

from hwrl.comm.factory import Comm as Comm
from hwrl.comm.factory import call_off_group as call_off_group
from hwrl.comm.factory import forget_group as forget_group
from hwrl.comm.group import Group as Group
from hwrl.comm.group import Pending as Pending
from hwrl.comm.sockets import process_sockets as process_sockets
from hwrl.comm.sockets import reachable_host as reachable_host
from hwrl.comm.staged import collectives_of as collectives_of
from hwrl.comm.store import PrefixStore as PrefixStore
from hwrl.comm.store import await_keys as await_keys
from hwrl.comm.store import clone_store as clone_store
from hwrl.comm.store import connect_store as connect_store
from hwrl.comm.store import is_on_loopback as is_on_loopback
from hwrl.comm.store import serve_store as serve_store
from hwrl.comm.store import store_address as store_address
from hwrl.comm.store import store_failures as store_failures
from hwrl.comm.tensors import ReduceOp as ReduceOp
from hwrl.comm.tensors import raw_bytes as raw_bytes
