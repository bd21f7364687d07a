"""Process groups on HCCL: independent of the default group, with a working abort, and without a watchdog.

torch's own way to a group (``torch_npu`` 2.10 to 2.13) has five traps. This module avoids each of them:

- A group without global ranks replaces the job's default group in a static variable. So we pass ranks.
- The watchdog ends the process some time after a timeout or a failure. So there is none.
- The first operation makes the communicator, and there the host blocks for a missing peer. So we run one operation at
  once, while all ranks are present.
- A device waits half an hour for a dead peer. So we set the group's own timeout on the device, too.
- ``ProcessGroup.abort`` does nothing. So we call ``abort_hccl_comm``.
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

_NAME_LENGTH = 100  # HCCL's limit of 127 less torch_npu's prefix; the end of hwrl's names is unique
_GRACE_S = 30  # the host times out first, and its error names the operation


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
    with environ.variable("TORCH_HCCL_BLOCKING_WAIT", "1"):  # read when a group is made; turns the watchdog off
        hccl = kind(store, rank, size, options)
    # Wait: otherwise the tensor's memory is reused while the device still writes to it.
    hccl.allreduce([torch.zeros(1, dtype=torch.int32, device=device)]).wait()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, hccl)
    return group


def abort(group: Any) -> None:
    """Destroy the communicators of ``group``; see :meth:`hwrl.Backend.abort_process_group`."""
    group._get_backend(torch.device("npu")).abort_hccl_comm("hwrl aborts the group")


def _refuse_static_ranks() -> None:
    """Raise if the environment describes a fixed job: HCCL would take the group's ranks for ranks of that job."""
    for name in ("RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"):
        if os.environ.get(name):
            raise UnsupportedError(
                "cannot make a group of processes without a common default group",
                why=f"{name}={os.environ[name]} makes torch_npu derive every group from the default one",
                fix=f"unset {name}",
            )
