"""Processes with a simulated node of their own, and a stream that stands still on request."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

MEMORY = 1 << 28
# Before torch is imported, as the simulator reads them once. A file of its own: no other job's memory counts here.
os.environ |= {"NPUSIM_MEMORY": str(MEMORY), "NPUSIM_NODE": f"/tmp/npusim-test-{os.getpid()}", "OMP_NUM_THREADS": "1"}


def pytest_unconfigure() -> None:
    Path(os.environ["NPUSIM_NODE"]).unlink(missing_ok=True)


def libascendcl() -> str:
    spec = find_spec("torch_npu")
    assert spec is not None and spec.submodule_search_locations
    return f"{spec.submodule_search_locations[0]}.libs/libascendcl.so"


class Python:
    """A process that runs the code with `acl` as the simulated runtime: without torch, so that it starts at once."""

    def __init__(self, code: str, *args: object, env: dict[str, str], file: Path | None = None) -> None:
        preamble = f"import ctypes, os, sys; acl = ctypes.CDLL({libascendcl()!r}, use_errno=True)\n"
        command = [sys.executable, str(file)] if file else [sys.executable, "-c", preamble + code]
        self._process = subprocess.Popen(
            [*command, *map(str, args)],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def result(self) -> tuple[int, str, str]:
        """Its exit status, output and errors, once it has ended."""
        out, err = self._process.communicate(timeout=2000)
        return self._process.returncode, out, err


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Callable[..., Python]]:
    started: list[Python] = []

    def start(code: str, *args: object, file: Path | None = None, **env: str) -> Python:
        started.append(Python(code, *args, env={"NPUSIM_NODE": str(tmp_path / "node"), **env}, file=file))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@contextmanager
def held(stream: "torch.npu.Stream") -> Iterator[None]:
    """The stream does nothing until the end of the block, by a callback that waits; then all that it got is done."""
    gate = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait() and None)
    acl = ctypes.CDLL(libascendcl())
    assert acl.aclrtLaunchHostFunc(ctypes.c_void_p(stream.npu_stream), callback, None) == 0
    try:
        yield
    finally:
        gate.set()
        stream.synchronize()  # torch_npu's, not the runtime's: a thread of torch_npu may have work for it yet
