"""vLLM's engine core ends with the rollout process that started it, even if that was killed."""

from __future__ import annotations

import os
import select
import threading

OWNER = "HWRL_VLLM_OWNER"
"""The environment variable with the rollout process's id."""


def end_with_owner() -> None:
    """Let this process end with its owner, if that is its parent; vLLM calls this early in each of its processes.

    vLLM's workers end with the engine core, but the engine core itself would wait for requests for ever.
    """
    owner = os.getppid()
    if os.environ.get(OWNER) == str(owner):
        threading.Thread(target=_end_after, args=(os.pidfd_open(owner),), name="hwrl-owner", daemon=True).start()


def _end_after(owner: int) -> None:
    select.select([owner], [], [])
    os._exit(1)
