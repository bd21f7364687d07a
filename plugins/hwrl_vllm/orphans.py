"""End vLLM's processes when their owner ends, even if it was killed. The owner is the rollout process."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from hwrl_vllm.causes import report_errors

OWNER = "HWRL_VLLM_OWNER"
"""The environment variable with the owner's process id."""

_LOOK_S = 1.0
"""Seconds between two looks for the owner, on a system without ``pidfd_open``."""


def end_with_owner() -> None:
    """End this process when its owner ends, and report errors to the owner. vLLM calls this in each of its processes.

    Returns at once: a thread waits for the owner's end. The owner may have ended already. Without this call the engine
    core of a killed owner would wait for requests for ever; vLLM's workers end with the engine core. Raises nothing,
    because vLLM does not start after an error. Does nothing in the owner itself, and in a process without an owner.
    """
    with suppress(Exception):
        owner = int(os.environ[OWNER])
        if owner != os.getpid():
            report_errors()
            threading.Thread(target=_end_after, args=(owner,), name="hwrl-owner", daemon=True).start()


def _end_after(owner: int) -> None:
    try:
        select.select([os.pidfd_open(owner)], [], [])
    except ProcessLookupError:
        pass
    except (OSError, AttributeError, ValueError):  # not on this system, or select cannot take so high a descriptor
        _wait_by_looking(owner)
    os._exit(1)


def _wait_by_looking(owner: int) -> None:
    parent = os.getppid()
    with suppress(ProcessLookupError):
        while os.getppid() == parent:  # a dead owner may stay as a zombie, and then kill() still finds its id
            with suppress(PermissionError):
                os.kill(owner, 0)
            time.sleep(_LOOK_S)
