"""How slow this machine is: limits that have to run out in a test are multiplied by it. `ci/check` asks for the cores.

The first process of a test run measures it and tells the others, in the variable of the kit (``HWRL_TIMEOUT_SCALE``).
A user may set the variable instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hwrl.testing.limits import TIMEOUT_SCALE, scaled

_WORK = "n = 0\nfor _ in range(1_000_000): n += 1"
_WORK_S = 0.15
"""The time of the work in a new process on an idle machine for which the limits were written."""
_OWN_LOAD = 2.0 if "pytest" in sys.modules else 1.0
"""What the other tests take from it."""
_SLOWEST = 16.0
"""At most: no test may last longer than pytest's limit."""


def cores(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many processors this process may use; a container's share may be half a one."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(groups, mounted)])


def _quotas(groups: Path, mounted: Path) -> Iterator[float]:
    """Yield the processors that each control group of this process permits (both versions of control groups)."""
    for line in groups.read_text("utf-8").splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            try:
                quota, period = " ".join((group / name).read_text("ascii") for name in names).split()
            except (OSError, ValueError):  # no such group, or not of this controller
                continue
            if group.is_relative_to(root) and quota not in ("max", "-1"):
                yield int(quota) / int(period)


def slowness() -> float:
    """Return how many times longer than on an idle machine things take here now; at least 1."""
    begun_s = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", _WORK], check=True)
    measured = (time.monotonic() - begun_s) / _WORK_S
    # The processes that run now: the load of the last minute may be another's that has ended.
    running = int(Path("/proc/loadavg").read_text("ascii").split()[3].partition("/")[0])
    return max(1.0, measured, running / (os.cpu_count() or 1))


if TIMEOUT_SCALE not in os.environ:
    os.environ[TIMEOUT_SCALE] = f"{min(_OWN_LOAD * slowness(), _SLOWEST):.1f}"

for _name, _seconds, _unit in (
    ("RAY_gcs_server_port_wait_time_s", 30, 1),
    ("RAY_worker_register_timeout_seconds", 60, 1),
    ("RAY_agent_register_timeout_ms", 100, 1000),
):  # Ray gives up its own processes if they start more slowly; not longer for the raylet: a dead one is waited for, too
    os.environ.setdefault(_name, f"{scaled(_seconds) * _unit:.0f}")

slow = scaled
"""Return a number of seconds of an idle machine for this one. What must run out, but not for what is healthy."""

if __name__ == "__main__":
    print(max(1, int(cores())))
