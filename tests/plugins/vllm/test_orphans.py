"""vLLM's process and the rollout process that started it; needs no vLLM."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

CHILD = """
import os, sys, time
from hwrl_vllm.orphans import end_with_owner
end_with_owner()
print(os.getpid(), flush=True)
time.sleep(60)
"""
OWNER = """
import os, subprocess, sys, time
os.environ["HWRL_VLLM_OWNER"] = str(os.getpid()) if sys.argv[1] == "owner" else "1"
subprocess.Popen([sys.executable, "-c", sys.argv[2]])
time.sleep(60)
"""


@pytest.mark.parametrize(("kind", "ends"), [("owner", True), ("another", False)])
def test_a_process_ends_with_its_killed_owner_and_with_no_other(kind: str, ends: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, kind, CHILD], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        end = os.pidfd_open(child)
        owner.kill()
        ended, _, _ = select.select([end], [], [], 20.0 if ends else 1.0)
        if not ends:
            os.kill(child, 9)
        os.close(end)
    assert bool(ended) == ends
