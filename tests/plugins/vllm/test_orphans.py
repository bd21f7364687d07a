"""vLLM's process and the rollout process that started it; needs no vLLM."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from hwrl_vllm import orphans

CHILD = """
import os, sys, time
{before}
from hwrl_vllm.orphans import end_with_owner
parent = os.getppid()
print(os.getpid(), flush=True)
{wait}
end_with_owner()
print("watches", flush=True)
time.sleep(60)
"""
OWNER = """
import os, subprocess, sys, time
os.environ["HWRL_VLLM_OWNER"] = str(os.getpid()) if sys.argv[1] == "owner" else sys.argv[1]
subprocess.Popen([sys.executable, "-c", sys.argv[2]])
time.sleep(60)
"""
ORPHANED = "while os.getppid() == parent: time.sleep(0.01)"
NO_PIDFD = "del os.pidfd_open"
GVISOR = "def refuse(pid): raise OSError(38, 'Function not implemented')\nos.pidfd_open = refuse"


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
@pytest.mark.parametrize("before", ["", NO_PIDFD, GVISOR], ids=["linux", "no pidfd_open", "ENOSYS"])
def test_a_process_ends_with_its_killed_owner(before: str, late: bool) -> None:
    child = CHILD.format(before=before, wait=ORPHANED if late else "")
    assert ends("owner", child, look_first=not late, wait_s=200.0)


@pytest.mark.parametrize("owner", ["1", "no number"])
def test_a_process_of_no_owner_stays(owner: str) -> None:
    assert not ends(owner, CHILD.format(before="", wait=""), look_first=True, wait_s=1.0)


def ends(kind: str, code: str, *, look_first: bool, wait_s: float) -> bool:
    """Return whether a child of a process ends within ``wait_s`` after that was killed."""
    with subprocess.Popen([sys.executable, "-c", OWNER, kind, code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        if look_first:
            assert owner.stdout.readline() == "watches\n"
        end = os.pidfd_open(child)
        owner.kill()
        owner.wait()
        ended, _, _ = select.select([end], [], [], wait_s)
        if not ended:
            os.kill(child, 9)
        os.close(end)
    return bool(ended)


def test_the_owner_itself_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(orphans.OWNER, str(os.getpid()))
    monkeypatch.setattr(orphans, "report_errors", pytest.fail)
    orphans.end_with_owner()
