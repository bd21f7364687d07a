"""The CPU backend's memory: the machine's, or the limit of the container that this process is in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwrl_cpu.limits import UsableMemory, usable_memory

MIB = 1 << 20
SHOW = "import hwrl; info = hwrl.get_backend().memory_info(); print(info.total_nbytes, info.free_nbytes)"


def group(path: Path, *, limit: str, used: int, cached: int = 0, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nbucket 7\n")


def usable(tmp_path: Path, lines: str) -> UsableMemory:
    (tmp_path / "groups").write_text(lines)
    return usable_memory(tmp_path / "groups", tmp_path / "mounted")


def test_the_narrowest_group_above_a_process_limits_it(tmp_path: Path) -> None:
    group(tmp_path / "mounted/pod", limit=str(100 * MIB), used=30 * MIB, cached=10 * MIB)
    group(tmp_path / "mounted/pod/one", limit="max", used=20 * MIB)
    assert usable(tmp_path, "0::/pod/one\n") == (100 * MIB, 80 * MIB)


def test_in_a_container_the_path_may_be_the_hosts(tmp_path: Path) -> None:
    group(tmp_path / "mounted/memory", limit=str(64 * MIB), used=70 * MIB, version=1)
    assert usable(tmp_path, "4:cpu,memory:/docker/abc\n3:pids:/docker/abc\n0::/\n") == (64 * MIB, 0)


@pytest.mark.parametrize("lines", ["0::/\n", "4:memory:/a\n", ""])
def test_without_a_limit_the_machine_has_all(tmp_path: Path, lines: str) -> None:
    group(tmp_path / "mounted", limit="max", used=MIB)
    group(tmp_path / "mounted/memory/a", limit="9223372036854771712", used=MIB, version=1)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable(tmp_path, lines).total_nbytes == machine
    assert usable_memory(tmp_path / "none", tmp_path / "mounted").total_nbytes == machine


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group with a limit of 512 MiB, below this process's; skips where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    old = [line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "memory"]
    root = Path("/sys/fs/cgroup/memory" + old[0]) if old else Path("/sys/fs/cgroup" + lines[-1].split(":", 2)[2])
    made = root / f"hwrl-test-{uuid.uuid4().hex}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(512 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"this process may make no control group with a limit of memory: {error}")
    yield made
    made.rmdir()


def test_a_process_in_a_real_group_sees_its_limit(limited: Path) -> None:
    enter = f"open({str(limited / 'cgroup.procs')!r}, 'w').write('0')\n"
    env = os.environ | {"HWRL_BACKEND": "cpu"}
    said = subprocess.run([sys.executable, "-c", enter + SHOW], env=env, capture_output=True, text=True, check=True)
    total, free = map(int, said.stdout.split())
    assert total == 512 * MIB and 0 < free < total
