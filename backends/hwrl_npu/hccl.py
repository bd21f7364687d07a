"""Process groups on HCCL that depend on no default group, can be aborted, and end no process.

torch's own way to a group (``torch_npu`` 2.10 to 2.13) has traps, each of which is met here:

- a group without global ranks takes the place of the job's default group in a static variable, so ranks are given;
- the watchdog ends the process some time after an operation timed out or failed, so there is none;
- the communicator is made by the first operation, in which the host blocks for a peer that does not come, so that
  operation is done at once, where all ranks are known to be there;
- a device that waits for a dead peer waits for half an hour, so it is told the group's own timeout;
- ``ProcessGroup.abort`` does nothing; ``abort_hccl_comm`` does.
"""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hwrl import environ
from hwrl.comm import Store
from hwrl.errors import UnsupportedError

_NAME_LENGTH = 100  # HCCL's 127 less torch_npu's own prefix; the end is kept, which makes hwrl's names unique
_GRACE_S = 30  # the host gives up first, and says which operation it was


def create(store: Store, *, rank: int, size: int, name: str, timeout: timedelta, device: torch.device) -> Any:
    """Return a connected group; see :meth:`hwrl.Backend.create_process_group`."""
    import torch_npu

    _refuse_static_ranks()
    kind = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = kind.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(range(size))
    options.group_id = name[-_NAME_LENGTH:]
    options.hccl_config = {"hccl_exec_timeout": math.ceil(timeout.total_seconds()) + _GRACE_S}
    with environ.variable("TORCH_HCCL_BLOCKING_WAIT", "1"):  # read when a group is made; it leaves the watchdog out
        hccl = kind(store, rank, size, options)
    # Unless waited for, the tensor's memory is that of another while the device still writes there.
    hccl.allreduce([torch.zeros(1, dtype=torch.int32, device=device)]).wait()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, hccl)
    return group


def abort(group: Any) -> None:
    """Destroy the communicators of ``group``; see :meth:`hwrl.Backend.abort_process_group`."""
    group._get_backend(torch.device("npu")).abort_hccl_comm("hwrl aborts the group")


def _refuse_static_ranks() -> None:
    """Raise where HCCL would take a group's ranks for those of a job that was described in advance."""
    for name in ("RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"):
        if os.environ.get(name):
            raise UnsupportedError(
                "cannot make a group of processes that share no default group",
                why=f"{name}={os.environ[name]} makes torch_npu derive every group from the default one",
                fix=f"unset {name}",
            )
