"""The promises of hwrl.testing.processes."""

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from fcntl import ioctl
from functools import partial
from pathlib import Path
from termios import FIONREAD

import pytest

from hwrl.errors import CommTimeoutError, HwrlError
from hwrl.testing import Processes, preload, run_processes


def _say(rank: int, directory: Path, text: str) -> str:
    (directory / f"{rank}").write_text(text)
    return f"{text} {rank}"


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise CommTimeoutError("rank one failed", why="it was told to", fix="do not")


def _block(rank: int, ready: Path) -> int:
    if rank == 0:
        ready.touch()
        signal.pause()
    return rank


def test_results_come_back_by_rank(tmp_path: Path) -> None:
    assert run_processes(_say, 2, tmp_path, "hello") == ["hello 0", "hello 1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_an_error_is_raised_again_with_rank_and_traceback() -> None:
    with pytest.raises(CommTimeoutError, match="rank one failed") as caught:
        run_processes(_fail_on_one, 2)
    assert any("in rank 1" in note and "_fail_on_one" in note for note in caught.value.__notes__)


def test_a_killed_rank_is_an_outcome_and_the_others_are_kept(tmp_path: Path) -> None:
    with Processes(_block, 2, tmp_path / "ready") as processes:
        assert processes.wait(1).value == 1
        processes.kill(0)
        first, second = sorted(processes.outcomes(), key=lambda outcome: outcome.rank)
    assert second.value == 1
    assert isinstance(first.error, HwrlError) and "exit code -9" in str(first.error)


def _return_much(rank: int) -> bytes:
    return bytes(1 << 24)


def _open_pipes() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own, closed by now
            if str(entry.readlink()).startswith(("pipe:", "socket:")):
                found.add(int(entry.name))
    return found


def _unread_nbytes(pipes: set[int]) -> int:
    counts = [0]
    for pipe in pipes:
        with contextlib.suppress(OSError):  # a listening socket has no bytes
            counts.append(int.from_bytes(ioctl(pipe, FIONREAD, bytes(4)), sys.byteorder))
    return max(counts)


def test_a_rank_killed_while_it_sends_its_result_is_an_outcome() -> None:
    before = _open_pipes()
    with Processes(_return_much, 1) as processes:
        pipes = _open_pipes() - before
        while _unread_nbytes(pipes) <= 64:  # more than the size of the result: a part of it
            os.sched_yield()
        processes.kill(0)
        assert "exit code -9" in str(processes.wait(0).error)


def _block_beside_a_worker(rank: int, worker: Path) -> None:
    pid = os.fork()
    if pid:
        worker.with_suffix(".new").write_text(str(pid))
        worker.with_suffix(".new").rename(worker)
    signal.pause()


def test_a_killed_rank_is_an_outcome_though_its_worker_lives(tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    with Processes(_block_beside_a_worker, 1, worker, timeout_s=200.0) as processes:
        while not worker.exists():
            os.sched_yield()
        processes.kill(0)
        (ended,) = processes.outcomes()
        os.kill(int(worker.read_text()), signal.SIGKILL)
    assert "exit code -9" in str(ended.error)


def _block_with_a_log(rank: int, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    while True:
        signal.pause()


def test_the_deadline_ends_a_rank_that_hangs_and_says_where(tmp_path: Path) -> None:
    with pytest.raises(HwrlError, match="still running at the deadline"):
        run_processes(_block_with_a_log, 1, tmp_path / "log", timeout_s=3.0)
    assert "in _block_with_a_log" in (tmp_path / "log").read_text()


def _is_imported(rank: int, module: str) -> bool:
    return module in sys.modules


@pytest.mark.parametrize("target", [lambda rank: rank, partial(_is_imported, module="os"), Path.exists])
def test_what_is_no_module_level_function_is_refused(target: Callable[..., object]) -> None:
    with pytest.raises(HwrlError, match="module-level"):
        run_processes(target, 1)


def test_a_process_starts_with_what_was_preloaded() -> None:
    """tests/conftest.py asks for it, and this module does not import it."""
    assert run_processes(_is_imported, 1, "hypothesis") == [True]


def test_a_preload_after_the_first_start_is_an_error_unless_it_asks_for_nothing_new() -> None:
    run_processes(math.ldexp, 1, 3)
    preload("hwrl.comm")
    with pytest.raises(HwrlError, match=r"cannot import string, json for all processes(.|\n)*already started"):
        preload("string", "json", "hwrl.comm")


def _install_extension(folder: Path, source: str) -> None:
    """Install an extension of torch that torch loads at its import."""
    (folder / "acme_extension.py").write_text(source)
    metadata = folder / "acme_extension-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_extension\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nacme = acme_extension:load\n")


def test_each_process_loads_the_extensions_that_torch_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_extension(tmp_path, "def load():\n    import torch\n    torch.acme = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_processes(_is_imported, 2, "acme_extension") == [True, True]
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert run_processes(_is_imported, 1, "acme_extension") == [False]


def test_an_extension_that_fails_is_the_error_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_extension(tmp_path, "def load():\n    raise OSError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="Failed to load the backend extension: acme"):
        run_processes(math.ldexp, 1, 3)
