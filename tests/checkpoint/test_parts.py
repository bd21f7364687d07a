"""CheckpointManager and Offloader in somebody's program change no bit of it, fresh and resumed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Group, HashStore
from hwrl.errors import CheckpointError, CheckpointSaveError, ConfigError
from hwrl.memory import Offloader
from tests.checkpoint.programs import BACKEND, KINDS, Unusual, Usual, made, state_of, two_modules, with_optimizers
from tests.support.gated import Gated
from tests.support.group_ranks import on_ranks
from tests.support.optimizers import OPTIMIZERS, assert_same, frozen

STEPS = 4
EVERY_TIME = {"AdamW", "AdamW-fused", "SGD", "SGD-momentum", "Muon", "own"} | (KINDS.keys() - OPTIMIZERS.keys())


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(one: SimpleNamespace, directory: Path, *, begin: int | None, saves: bool, offloads: bool) -> None:
    """Train to the end; with ``begin``, from the checkpoint of this step in the directory ``saved`` beside."""
    with contextlib.ExitStack() as opened:
        manager = offloader = None
        if saves:
            manager = opened.enter_context(CheckpointManager(directory, backend=BACKEND, async_save=True, **one.parts))
        if offloads:
            # Several optimizers in one holder, as a user's class may have them.
            optimizers = [part for part in one.parts.values() if isinstance(part, torch.optim.Optimizer)]
            models = nn.ModuleList([part for part in one.parts.values() if isinstance(part, nn.Module)])
            offloader = opened.enter_context(Offloader(models, SimpleNamespace(all=optimizers), backend=BACKEND))
        if begin is not None:
            with CheckpointManager(directory.with_name("saved"), backend=BACKEND, **one.parts) as saved:
                found = saved.resume(step=begin)
            assert found is not None and found.step == begin
        elif manager is not None:
            assert manager.resume() is None
            manager.save(0)
        for step in range(begin or 0, STEPS):
            with contextlib.nullcontext() if offloader is None else offloader.loaded():
                one.step()
            if offloader is not None:
                offloader.offload()
            if manager is not None:
                with contextlib.nullcontext() if offloader is None else offloader.lending():
                    manager.save(step + 1, offloader=offloader)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "kind", [kind if kind in EVERY_TIME else pytest.param(kind, marks=pytest.mark.extended) for kind in KINDS]
)
def test_a_program_is_the_same_with_and_without_hwrl(kind: str, tmp_path: Path) -> None:
    plain = made(kind, seed=0)
    for _ in range(STEPS):
        plain.step()
    expected = state_of(plain)
    for name, begin, saves, offloads in [
        ("saved", None, True, False),
        ("offloaded", None, False, True),
        ("from the start", 0, True, True),
        ("from the middle", 2, True, True),
    ]:
        one = made(kind, seed=0 if begin is None else 1)
        train(one, tmp_path / name, begin=begin, saves=saves, offloads=offloads)
        assert_same(state_of(one), expected, where=name)
        if begin is None and kind in OPTIMIZERS:
            assert one.calls == plain.calls, "the hooks of an optimizer, by its own steps alone"


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


def test_the_order_of_parts_does_not_matter(tmp_path: Path) -> None:
    """The names of an optimizer's parameters must not depend on it: a state that is not found is not restored."""
    one, other = two_modules(shares=True), two_modules(order=("critic", "model"), shares=True)
    one.step()
    with CheckpointManager(tmp_path, backend=BACKEND, **one.parts) as manager:
        manager.save(1)
    with CheckpointManager(tmp_path, backend=BACKEND, **other.parts) as manager:
        assert manager.resume() is not None
    for name, part in one.parts.items():
        assert_same(frozen(other.parts[name].state_dict()), frozen(part.state_dict()))


def test_a_model_with_another_extra_state_is_refused_by_name(tmp_path: Path) -> None:
    for saved, other, where in ((Unusual, Usual, "state"), (Usual, Unusual, "checkpoint")):
        with CheckpointManager(tmp_path / where, backend=BACKEND, model=saved()) as manager:
            manager.save(1)
        match = f"the {where} has no 'model._extra_state'"
        manager = CheckpointManager(tmp_path / where, backend=BACKEND, model=other())
        with manager, pytest.raises(CheckpointError, match=match):
            manager.resume()


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_state_of_an_earlier_form_is_refused_by_that(tmp_path: Path) -> None:
    one = made("DDP", seed=0)
    one.step()
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        manager.save(1, {name: part.state_dict() for name, part in one.parts.items()})
    manager = CheckpointManager(tmp_path, backend=BACKEND, **one.parts)
    with manager, pytest.raises(CheckpointError, match="'optimizer' is there in another form, of an earlier version"):
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


def sharded(kind: str, mesh: Any, *, seed: int) -> SimpleNamespace:
    """A program under FSDP2, or whole without a mesh. Its batches are the same on all ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 8))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return with_optimizers(kind, model, lambda: model(torch.randn(3, 8)).square().mean())


def run_sharded(group: Group, directory: Path, kinds: list[str]) -> dict[str, Any]:
    """Compare on two ranks; return the weights. No manager gets a group."""
    weights, mesh = {}, init_device_mesh("cpu", (group.size,))
    for kind in kinds:
        plain = sharded(kind, mesh, seed=0)
        for _ in range(STEPS):
            plain.step()
        for name, begin in [("saved", None), ("from the start", 0), ("from the middle", 2)]:
            one = sharded(kind, mesh, seed=0 if begin is None else 1)
            train(one, directory / kind / name, begin=begin, saves=begin is None, offloads=False)
            assert_same(state_of(one), state_of(plain), where=name)
        weights[kind] = frozen([own.full_tensor() for own in plain.parts["model"].parameters()])
    return weights


def test_two_ranks_of_fsdp2_are_the_same_and_need_no_group(tmp_path: Path) -> None:
    kinds = ["AdamW", "AdamW-fused", "SGD", "SGD-momentum", "Muon", "Adagrad"]
    weights, _ = on_ranks(run_sharded, 2, tmp_path, kinds)
    for kind in kinds:
        alone = sharded(kind, None, seed=1)
        with CheckpointManager(tmp_path / kind / "saved", backend=BACKEND, **alone.parts) as manager:
            assert manager.resume() is not None
        assert_same(frozen(list(alone.parts["model"].parameters())), weights[kind])
        alone.step()
