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
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict

from hwrl.checkpoint import CheckpointManager, DurableFS
from hwrl.errors import CheckpointSaveError
from hwrl.memory import Offloader
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.halting import Halting

BACKEND = CpuBackend(INFO)


def trained(*, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, next(model.parameters()).shape[1])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def copy_of(value: Any) -> Any:
    """Return ``value`` with tensors of its own."""
    if isinstance(value, dict):
        return {key: copy_of(one) for key, one in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def saved_in(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the newest checkpoint, in the structure of ``state``."""
    found: dict[str, Any] = copy_of(state)
    with CheckpointManager(directory, backend=BACKEND) as opened:
        assert opened.resume(found) is not None
    return found


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    ours, theirs = flatten_state_dict(left)[0], flatten_state_dict(right)[0]
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_offloaded_state_is_saved_where_it_lies(tmp_path: Path, async_save: bool, params: bool) -> None:
    model, optimizer = trained()
    expected = copy_of(state_of(model, optimizer))
    nbytes = {name: sum(one.nbytes for one in part) for name, part in _parts(model, optimizer).items()}
    with Offloader(model, optimizer, backend=BACKEND) as offloader:
        offloader.offload(params=params)
        held = offloader.pool_nbytes
        with CheckpointManager(tmp_path, async_save=async_save, backend=BACKEND) as opened, offloader.lending():
            report = opened.save(1, state_of(model, optimizer), offloader=offloader)
        away = {
            name: not any(one.untyped_storage().nbytes() for one in part)
            for name, part in _parts(model, optimizer).items()
        }
        assert away == {"optimizer": True, "model": params}
        assert offloader.pool_nbytes == held
    lent = nbytes["optimizer"] + nbytes["model"] * params
    assert report.lent_nbytes == lent
    assert report.staged_nbytes == (nbytes["model"] if async_save and not params else 0)
    read_nbytes = nbytes["model"] if not params else 0
    assert report.staged_nbytes <= report.held_nbytes <= 2 * read_nbytes  # padding; a ring, if nothing was staged
    assert_same(saved_in(tmp_path, expected), expected)


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    state = [value for one in optimizer.state.values() for value in one.values()]
    return {"model": [one.detach() for one in model.parameters()], "optimizer": state}


def test_the_next_offload_waits_for_what_is_not_written_yet(tmp_path: Path) -> None:
    model, optimizer = trained()
    expected = copy_of(state_of(model, optimizer))
    fs = Halting("write", 3)
    with (
        Offloader(model, optimizer, backend=BACKEND) as offloader,
        CheckpointManager(tmp_path, async_save=True, backend=BACKEND, fs=fs) as opened,
    ):
        offloader.offload(params=False)
        with offloader.lending():
            opened.save(1, state_of(model, optimizer), offloader=offloader)
        assert fs.arrived.wait(300)
        offloader.load()
        train_step(model, optimizer)
        after = copy_of(state_of(model, optimizer))
        offloading = threading.Thread(target=lambda: offloader.offload(params=False))
        offloading.start()
        offloading.join(0.3)
        assert offloading.is_alive(), "it overwrote what the checkpoint still needs"
        fs.gate.set()
        offloading.join(300)
        assert not offloading.is_alive()
        opened.wait()
        offloader.load()
        assert_same(state_of(model, optimizer), after)
    assert_same(saved_in(tmp_path, expected), expected)


def test_all_that_is_lent_at_once_stays_until_it_is_given_back() -> None:
    model, optimizer = trained()
    weight = next(model.parameters()).detach()
    before = weight.clone()
    with Offloader(model, optimizer, backend=BACKEND) as offloader:
        offloader.offload()
        copies = offloader.lend_all()
        offloader.load()
        train_step(model, optimizer)
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
    model, optimizer = trained()
    fs = Halting("write", 3)
    fs.error = OSError(28, "No space left on device", "somewhere")
    fs.gate.set()
    with (
        Offloader(model, optimizer, backend=BACKEND) as offloader,
        CheckpointManager(tmp_path, async_save=True, backend=BACKEND, fs=fs) as opened,
    ):
        offloader.offload()
        with offloader.lending():
            opened.save(1, state_of(model, optimizer), offloader=offloader)
            with pytest.raises(CheckpointSaveError, match="step 1 was not saved"):
                opened.wait()
            with pytest.raises(CheckpointSaveError, match="not JSON") as caught:
                opened.save(1, state_of(model, optimizer), offloader=offloader, extra={"not JSON": object()})
        with offloader.loaded():  # would wait for ever
            train_step(model, optimizer)
        del caught


class Weighing(DurableFS):
    """Notes the process's memory when all tensors are written and not yet let go."""

    def before(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.suffix == ".distcp":
            self.resident_nbytes = resident_nbytes()


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def added_by_a_save(rank: int, directory: Path) -> tuple[int, int]:
    model, optimizer = trained(width=1024)
    fs = Weighing()
    with (
        Offloader(model, optimizer, backend=BACKEND) as offloader,
        CheckpointManager(directory, async_save=True, backend=BACKEND, fs=fs) as opened,
    ):
        offloader.offload()
        before = resident_nbytes()
        with offloader.lending():
            report = opened.save(1, state_of(model, optimizer), offloader=offloader)
        opened.wait()
        return fs.resident_nbytes - before, report.lent_nbytes


def test_an_offloaded_state_takes_no_host_memory_to_save(tmp_path: Path) -> None:
    [(added_nbytes, lent_nbytes)] = run_processes(added_by_a_save, 1, tmp_path)
    assert lent_nbytes > 24 << 20
    assert added_nbytes < 4 << 20, "the state was copied"


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
        expected = {"weight": torch.ones(3)}
        assert_same(saved_in(tmp_path, {"weight": torch.zeros(3)}), expected)
