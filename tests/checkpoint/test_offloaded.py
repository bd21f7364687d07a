"""Saving a state that an Offloader holds on the host: neither loaded nor copied, and never mixed with the next step."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hwrl.checkpoint import CheckpointManager, DurableFS
from hwrl.errors import CheckpointSaveError
from hwrl.memory import Offloader
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.halting import Halting
from tests.support.optimizers import assert_same, frozen

BACKEND = CpuBackend(INFO)


def trained(*, width: int = 8) -> dict[str, Any]:
    """Return a model and its optimizer after a step, as parts of a manager."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    train_step(**parts)
    return parts


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, next(model.parameters()).shape[1])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def content_of(parts: dict[str, Any]) -> Any:
    return frozen({name: part.state_dict() for name, part in parts.items()})


def saved_in(directory: Path) -> Any:
    """Return the content of the newest checkpoint."""
    other = trained()
    train_step(**other)
    with CheckpointManager(directory, backend=BACKEND, **other) as opened:
        assert opened.resume() is not None
    return content_of(other)


def opened_for(parts: dict[str, Any], directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, backend=BACKEND, **{"async_save": True, **options}, **parts)


@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_offloaded_state_is_saved_where_it_lies(tmp_path: Path, async_save: bool, params: bool) -> None:
    parts = trained()
    expected = content_of(parts)
    nbytes = {name: sum(one.nbytes for one in tensors) for name, tensors in _tensors(**parts).items()}
    with Offloader(*parts.values(), backend=BACKEND) as offloader:
        offloader.offload(params=params)
        held = offloader.pool_nbytes
        with opened_for(parts, tmp_path, async_save=async_save) as opened, offloader.lending():
            report = opened.save(1, offloader=offloader)
        away = {
            name: not any(one.untyped_storage().nbytes() for one in tensors)
            for name, tensors in _tensors(**parts).items()
        }
        assert away == {"optimizer": True, "model": params}
        assert offloader.pool_nbytes == held
    lent = nbytes["optimizer"] + nbytes["model"] * params
    assert report.lent_nbytes == lent
    assert report.staged_nbytes == (nbytes["model"] if async_save and not params else 0)
    read_nbytes = nbytes["model"] if not params else 0
    assert report.staged_nbytes <= report.held_nbytes <= 2 * read_nbytes  # padding; a ring, if nothing was staged
    assert_same(saved_in(tmp_path), expected)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    state = [value for one in optimizer.state.values() for value in one.values()]
    return {"model": [one.detach() for one in model.parameters()], "optimizer": state}


def test_the_next_offload_waits_for_what_is_not_written_yet(tmp_path: Path) -> None:
    parts = trained()
    expected, fs = content_of(parts), Halting("write", 3)
    with Offloader(*parts.values(), backend=BACKEND) as offloader, opened_for(parts, tmp_path, fs=fs) as opened:
        offloader.offload(params=False)
        with offloader.lending():
            opened.save(1, offloader=offloader)
        assert fs.arrived.wait(300)
        offloader.load()
        train_step(**parts)
        after = content_of(parts)
        offloading = threading.Thread(target=lambda: offloader.offload(params=False))
        offloading.start()
        offloading.join(0.3)
        assert offloading.is_alive(), "it overwrote what the checkpoint still needs"
        fs.gate.set()
        offloading.join(300)
        assert not offloading.is_alive()
        opened.wait()
        offloader.load()
        assert_same(content_of(parts), after)
    assert_same(saved_in(tmp_path), expected)


def test_all_that_is_lent_at_once_stays_until_it_is_given_back() -> None:
    parts = trained()
    weight = next(parts["model"].parameters()).detach()
    before = weight.clone()
    with Offloader(*parts.values(), backend=BACKEND) as offloader:
        offloader.offload()
        copies = offloader.lend_all()
        offloader.load()
        train_step(**parts)
        offloading = threading.Thread(target=offloader.offload)
        offloading.start()
        offloading.join(0.3)
        assert offloading.is_alive(), "it overwrote what is lent"
        copy = copies.lend(weight)
        copies.give_back()
        offloading.join(0.3)
        assert offloading.is_alive() and copy is not None, "one is lent for itself"
        assert torch.equal(copy.tensor, before)
        copy.give_back()
        offloading.join(300)
        assert not offloading.is_alive() and copies.lend(torch.ones(3)) is None


def test_a_failed_save_gives_back_what_it_was_lent(tmp_path: Path) -> None:
    parts, fs = trained(), Halting("write", 3)
    fs.error = OSError(28, "No space left on device", "somewhere")
    fs.gate.set()
    with Offloader(*parts.values(), backend=BACKEND) as offloader, opened_for(parts, tmp_path, fs=fs) as opened:
        offloader.offload()
        with offloader.lending():
            opened.save(1, offloader=offloader)
            with pytest.raises(CheckpointSaveError, match="step 1 was not saved"):
                opened.wait()
            with pytest.raises(CheckpointSaveError, match="not JSON") as caught:
                opened.save(1, offloader=offloader, extra={"not JSON": object()})
        with offloader.loaded():  # would wait for ever
            train_step(**parts)
        del caught


class Weighing(DurableFS):
    """Notes the process's memory when all tensors are written and not yet let go."""

    def before(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.suffix == ".distcp":
            self.resident_nbytes = resident_nbytes()


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def added_by_a_save(rank: int, directory: Path) -> tuple[int, int]:
    parts, fs = trained(width=1024), Weighing()
    with Offloader(*parts.values(), backend=BACKEND) as offloader, opened_for(parts, directory, fs=fs) as opened:
        offloader.offload()
        before = resident_nbytes()
        with offloader.lending():
            report = opened.save(1, offloader=offloader)
        opened.wait()
        return fs.resident_nbytes - before, report.lent_nbytes


def test_an_offloaded_state_takes_no_host_memory_to_save(tmp_path: Path) -> None:
    [(added_nbytes, lent_nbytes)] = run_processes(added_by_a_save, 1, tmp_path)
    assert lent_nbytes > 24 << 20
    assert added_nbytes < lent_nbytes // 3, "the state was copied"  # a few MB are what the first save imports


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_that_ends_without_close_still_completes_its_save(tmp_path: Path, fails: bool) -> None:
    program = f"""
        import os, time, torch
        from hwrl.checkpoint import CheckpointManager, DurableFS

        class Slow(DurableFS):
            def before(self, operation, path):
                if operation == "create" and path.suffix == ".distcp":
                    time.sleep(0.5)
                    if {fails}:
                        raise OSError(28, "No space left on device", "somewhere")

        os.register_at_fork(before=lambda: print("forked"))
        opened = CheckpointManager({str(tmp_path)!r}, async_save=True, fs=Slow())
        opened.save(1, {{"weight": torch.ones(3)}})
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=600, check=True
    )
    assert not ended.stdout, "a process with a device must not be forked"
    if fails:
        assert "step 1 was not saved" in ended.stderr and "No space left" in ended.stderr
        assert not list(tmp_path.glob("global_step_*"))
    else:
        with CheckpointManager(tmp_path, backend=BACKEND) as manager:
            assert manager.resume(state := {"weight": torch.zeros(3)}) is not None
        assert state["weight"].tolist() == [1.0] * 3
