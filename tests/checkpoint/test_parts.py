"""CheckpointManager and Offloader in somebody's program change no bit of it, fresh and resumed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hwrl.checkpoint import CheckpointManager, rng_state
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.errors import CheckpointError, CheckpointSaveError, ConfigError
from hwrl.memory import Offloader
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.gated import Gated
from tests.support.optimizers import OPTIMIZERS, assert_same, frozen

BACKEND = CpuBackend(INFO)
STEPS = 4
EVERY_TIME = ("AdamW", "AdamW-fused", "SGD", "SGD-momentum", "Muon", "own")


class Policy(nn.Module):
    """Tied, frozen and unused parameters, dropout, and a buffer that steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 32))
        self.inner[3].bias.requires_grad_(False)
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(self.embed(tokens)))
        return result


class Program:
    """A plain loop: two micro-batches a step, clipped gradients, one scheduler for each optimizer, hooks of its own."""

    def __init__(self, kind: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Policy()
        self.optimizers = OPTIMIZERS[kind](self.model)
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 10) for one in self.optimizers]
        self.calls: list[str] = []
        for one in self.optimizers:
            one.register_step_pre_hook(lambda *_: self.calls.append("before"))
            one.register_step_post_hook(lambda *_: self.calls.append("after"))

    @property
    def parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model}
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            parts |= {f"optimizer{number}": optimizer, f"scheduler{number}": scheduler}
        return parts

    def step(self) -> None:
        for _ in range(2):
            tokens = torch.randint(16, (8,))
            nn.functional.cross_entropy(self.model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def state(self) -> Any:
        return frozen(
            {
                "parts": {name: part.state_dict() for name, part in self.parts.items()},
                "gradients": [one.grad for one in self.model.parameters()],
                "random numbers": rng_state(BACKEND),
                "calls": self.calls,
                "step": [type(one).step for one in self.optimizers],
                "hooks": [len(one._optimizer_step_pre_hooks) for one in self.optimizers],
            }
        )


@contextlib.contextmanager
def joined(program: Program, directory: Path, part: str, *, async_save: bool) -> Iterator[Any]:
    """Run with hwrl's parts: yield the manager, or None, and the offloader, or None."""
    with contextlib.ExitStack() as opened:
        manager = offloader = None
        if part != "offload":
            manager = CheckpointManager(directory, backend=BACKEND, async_save=async_save, **program.parts)
            opened.enter_context(manager)
        if part != "checkpoint":
            # Two optimizers in one holder, as a user's class may have them.
            offloader = Offloader(program.model, SimpleNamespace(all=program.optimizers), backend=BACKEND)
            opened.enter_context(offloader)
        yield SimpleNamespace(manager=manager, offloader=offloader)


def train(program: Program, joined: Any, *, begin: int, end: int) -> None:
    for step in range(begin, end):
        with contextlib.nullcontext() if joined.offloader is None else joined.offloader.loaded():
            program.step()
        if joined.offloader is not None:
            joined.offloader.offload()
        if joined.manager is not None:
            with contextlib.nullcontext() if joined.offloader is None else joined.offloader.lending():
                joined.manager.save(step + 1, offloader=joined.offloader)


@pytest.mark.parametrize("part", ["checkpoint", "offload", "both"])
@pytest.mark.parametrize(
    "kind", [kind if kind in EVERY_TIME else pytest.param(kind, marks=pytest.mark.extended) for kind in OPTIMIZERS]
)
def test_a_program_is_the_same_with_and_without_hwrl(kind: str, part: str, tmp_path: Path) -> None:
    program = Program(kind, seed=0)
    for _ in range(STEPS):
        program.step()
    expected = program.state()
    fresh = Program(kind, seed=0)
    with joined(fresh, tmp_path, part, async_save=True) as parts:
        if parts.manager is not None:
            assert parts.manager.resume() is None
            parts.manager.save(0)
        train(fresh, parts, begin=0, end=STEPS)
    assert_same(fresh.state(), expected)
    if part == "offload":
        return
    for begin in (0, 2):
        resumed = Program(kind, seed=1)
        with joined(resumed, tmp_path / f"from {begin}", part, async_save=False) as parts:
            with CheckpointManager(tmp_path, backend=BACKEND, **resumed.parts) as saved:
                found = saved.resume(step=begin)
            assert found is not None and found.step == begin
            train(resumed, parts, begin=begin, end=STEPS)
        resumed.calls = ["before", "after"] * (STEPS * len(resumed.optimizers))
        assert_same(resumed.state(), expected)


def linear(*, size: int = 4) -> dict[str, Any]:
    model = nn.Linear(size, size)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [one]} for one in model.parameters()]


def stepped(parts: dict[str, Any]) -> dict[str, Any]:
    parts["model"](torch.ones(1, 4)).sum().backward()
    parts["optimizer"].step()
    return parts


def test_objects_may_be_in_a_state_beside_values_and_load_from_there(tmp_path: Path) -> None:
    saved, other = stepped(linear()), linear()
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        manager.save(1, {**saved, "count": 3, "rows": torch.ones(2)})
        state: dict[str, Any] = {**other, "count": 0, "rows": torch.zeros(2)}
        manager.resume(state)
    assert state["count"] == 3 and state["rows"].tolist() == [1, 1] and state["model"] is other["model"]
    for name in saved:
        assert_same(frozen(other[name].state_dict()), frozen(saved[name].state_dict()))


class Own:
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_any_stateful_object_comes_back_as_it_was(tmp_path: Path) -> None:
    value: Any = {0: [torch.ones(2), (3, {"a.b": torch.zeros(1), "a": {"b": 4}})], "none": None, True: {}, (1, 2): "x"}
    with CheckpointManager(tmp_path, backend=BACKEND, position=Own(value)) as manager:
        manager.save(1)
    other = Own({"of": "another structure"})
    with CheckpointManager(tmp_path, backend=BACKEND, position=other) as manager:
        manager.resume()
    assert_same(frozen(other.value), frozen(value))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda parts: parts | {"scheduler": Own(1)}, "the checkpoint has no 'scheduler'"),
        (lambda parts: {"model": parts["model"]}, "the state lacks .* names, for example 'optimizer"),
(lambda parts: {**parts, "optimizer": torch.optim.AdamW(two_groups(parts["model"]))}, "param_groups.1"),
        (lambda _: linear(size=5), r"\[4, 4\] in the checkpoint"),
    ],
)  # fmt: skip
def test_other_objects_are_refused_and_not_half_loaded(change: Any, why: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, backend=BACKEND, **stepped(linear())) as manager:
        manager.save(1)
    parts = change(linear())
    before = frozen(parts["model"].state_dict())
    match = f"(?s)does not fit.*{why}"
    with CheckpointManager(tmp_path, backend=BACKEND, **parts) as manager, pytest.raises(CheckpointError, match=match):
        manager.resume()
    assert_same(frozen(parts["model"].state_dict()), before)


def test_what_cannot_be_taken_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_ckpt_to_kep=2(?s:.*)no such option"):
        CheckpointManager(tmp_path, backend=BACKEND, max_ckpt_to_kep=2)
    parts = linear()
    with (
        CheckpointManager(tmp_path, backend=BACKEND, **parts) as manager,
        pytest.raises(CheckpointSaveError, match="the call has a state, and the manager has parts"),
    ):
        manager.save(1, {"model": parts["model"].state_dict()})
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        with pytest.raises(CheckpointSaveError, match=r"there is no state(?s:.*)model=, optimizer="):
            manager.save(1)
        with pytest.raises(CheckpointError, match="there is no state"):
            manager.resume()


# -- the wrong process ------------------------------------------------------------------------------------------


def answers_in_child(*calls: Any) -> list[str]:
    """Fork, call ``calls`` in the child, and return the texts of their errors."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        texts = []
        for call in calls:
            try:
                texts.append(f"returned {call()}")
            except BaseException as exc:  # noqa: BLE001 - the parent compares it
                texts.append(f"{type(exc).__name__}: {exc}")
        os.write(writing, json.dumps(texts).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    found: list[str] = json.loads(text)
    return found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_leaves_the_parents_save_alone(tmp_path: Path) -> None:
    fs = Gated()
    parts = linear()
    with CheckpointManager(tmp_path, backend=BACKEND, async_save=True, fs=fs, **parts) as manager:
        manager.save(1)
        assert fs.arrived.wait(300)
        calls = [lambda: manager.save(2), manager.resume, manager.wait, manager.close, lambda: manager.is_saving]
        for text in answers_in_child(*calls, lambda: manager.__exit__(None)):
            assert f"process {os.getpid()} opened the manager, and this is its forked child" in text
        fs.gate.set()
        manager.save(2)
        manager.wait()
        assert [info.step for info in manager.checkpoints()] == [1, 2]


def test_ranks_that_do_not_know_of_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"group= in rank 1 of 2(?s:.*)init_process_group"):
        CheckpointManager(tmp_path, backend=BACKEND)
    monkeypatch.setenv("WORLD_SIZE", "1")
    CheckpointManager(tmp_path, backend=BACKEND).close()


# -- several ranks ----------------------------------------------------------------------------------------------


class Sharded(Program):
    """The program under FSDP2, or whole without a mesh. Its batches are the same on all ranks."""

    def __init__(self, kind: str, mesh: Any, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 8))
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizers = OPTIMIZERS[kind](self.model)
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 10) for one in self.optimizers]
        self.calls = []

    def step(self) -> None:
        self.model(torch.randn(3, 8)).square().mean().backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def run_sharded(rank: int, address: str, directory: Path, kinds: list[str]) -> dict[str, Any]:
    """Compare on two ranks; return the weights of rank 0. No manager gets a group."""
    weights = {}
    with Comm(BACKEND).init_default(store=connect_store(address), rank=rank, size=2):
        mesh = init_device_mesh("cpu", (2,))
        for kind in kinds:
            program, fresh, resumed = (Sharded(kind, mesh, seed=seed) for seed in (0, 0, 1))
            torch.manual_seed(2)
            for _ in range(STEPS):
                program.step()
            expected = program.state()
            torch.manual_seed(2)
            with CheckpointManager(directory / kind, backend=BACKEND, async_save=True, **fresh.parts) as manager:
                assert manager.resume() is None
                manager.save(0)
                for step in range(STEPS):
                    fresh.step()
                    manager.save(step + 1)
                assert_same(fresh.state(), expected)
            for begin in (0, 2):
                resumed = Sharded(kind, mesh, seed=1)
                with CheckpointManager(directory / kind, backend=BACKEND, **resumed.parts) as manager:
                    assert manager.resume(step=begin) is not None
                for _ in range(begin, STEPS):
                    resumed.step()
                assert_same(resumed.state(), expected)
            weights[kind] = frozen([own.full_tensor() for own in program.model.parameters()])
    return weights


def test_two_ranks_of_fsdp2_are_the_same_and_need_no_group(tmp_path: Path) -> None:
    kinds = ["AdamW", "AdamW-fused", "SGD", "SGD-momentum", "Muon", "Adagrad"]
    store = serve_store()
    weights, _ = run_processes(run_sharded, 2, store_address(store), tmp_path, kinds)
    for kind in kinds:
        alone = Sharded(kind, None, seed=1)
        with CheckpointManager(tmp_path / kind, backend=BACKEND, **alone.parts) as manager:
            assert manager.resume() is not None
        assert_same(frozen(list(alone.model.parameters())), weights[kind])
        alone.step()
