"""vLLM's processes end with the rollout process that started them, even if that was killed."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from hwrl_vllm.causes import tell_errors

OWNER = "HWRL_VLLM_OWNER"
"""The environment variable with the rollout process's id."""

_LOOK_S = 1.0
"""How often a process looks for its owner, where the system cannot tell of its end."""


def end_with_owner() -> None:
    """Let this process end with its owner, and tell the owner its errors; vLLM calls this in each of its processes.

    vLLM's workers end with the engine core, but the engine core itself would wait for requests for ever. The owner may
    have ended already. Raises nothing: vLLM would not start.
    """
    with suppress(Exception):
        owner = int(os.environ[OWNER])
        if owner != os.getpid():
            tell_errors()
            threading.Thread(target=_end_after, args=(owner,), name="hwrl-owner", daemon=True).start()


def _end_after(owner: int) -> None:
    try:
        select.select([os.pidfd_open(owner)], [], [])
    except ProcessLookupError:
        pass
    except (OSError, AttributeError, ValueError):  # not on this system, or a descriptor beyond select's
        _wait_by_looking(owner)
    os._exit(1)


def _wait_by_looking(owner: int) -> None:
    parent = os.getppid()
    with suppress(ProcessLookupError):
        while os.getppid() == parent:  # a dead owner may stay as a zombie, with its id
            with suppress(PermissionError):
                os.kill(owner, 0)
            time.sleep(_LOOK_S)
