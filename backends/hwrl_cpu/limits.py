"""The memory that this process may use: the machine's, or less in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


class UsableMemory(NamedTuple):
    """``total_nbytes`` this process may use at most, and ``free_nbytes`` of them that it can still allocate.

    Pages of files that the kernel can drop count as free; in a control group, the inactive ones only.
    """

    total_nbytes: int
    free_nbytes: int


def usable_memory(groups: Path = _GROUPS, mounted: Path = _MOUNTED) -> UsableMemory:
    """Return the machine's memory, or less if a control group of this process has a limit.

    ``groups`` is the kernel's list of this process's control groups, and ``mounted`` the directory of their files; both
    versions of control groups are read (Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst).
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = _available_nbytes() or os.sysconf("SC_AVPHYS_PAGES") * page
    for limit, used in _limits(groups, mounted):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return UsableMemory(total, free)


def _available_nbytes() -> int:
    """Return Linux's estimate of what a process can still allocate; the file cache counts. 0 on other systems."""
    try:
        return _named_number(Path("/proc/meminfo"), "MemAvailable:") << 10
    except OSError:
        return 0


def _limits(groups: Path, mounted: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each control group that limits this process: its own and those above."""
    try:
        lines = groups.read_text("utf-8").splitlines()
    except OSError:  # no control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits_above(mounted, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_above(mounted / "memory", path, *names)


def _limits_above(root: Path, path: str, limit: str, used: str, cached: str) -> Iterator[tuple[int, int]]:
    own = root / path.lstrip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(root):
            return
        try:
            text = (group / limit).read_text("ascii").strip()
            if text != "max":
                cache = _named_number(group / "memory.stat", cached)
                yield int(text), int((group / used).read_text("ascii")) - cache
        except (OSError, ValueError):  # in a container the path may be the host's; the container's group is the root
            continue


def _named_number(path: Path, name: str) -> int:
    """Return the number after ``name`` in a file of lines; 0 if there is no such line."""
    with path.open(encoding="ascii") as file:
        return next((int(words[1]) for line in file if (words := line.split())[:1] == [name]), 0)
