"""No end of an offloader loses data, and no use of what it holds ends the process. They run in a child."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hwrl.errors import MemoryStateError
from hwrl.memory import Offloader
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)


class Part:
    """A trained model with a tied weight and a buffer, its optimizer, an offloader that holds both, their values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight
        self.model = nn.Sequential(self.first, self.norm, self.last)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(4, 16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = self.model.state_dict()
        self.before = [tensor.clone() for tensor in self.tensors()]
        self.offloader: Offloader | None = self.make()
        self.offloader.offload()

    def make(self) -> Offloader:
        return Offloader(self.model, self.optimizer, backend=BACKEND)

    def tensors(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *states]

    def require_kept(self) -> None:
        for tensor, before in zip(self.tensors(), self.before, strict=True):
            assert torch.equal(tensor, before) and type(tensor) in (torch.Tensor, nn.Parameter)
        self.model(torch.ones(4, 16)).sum().backward()
        self.optimizer.step()


def drop(part: Part) -> None:
    part.offloader = None
    part.require_kept()


def drop_in_a_cycle(part: Part) -> None:
    part.model.of = part.offloader  # type: ignore[assignment] # no module
    cycle: list[Any] = [part.offloader]
    cycle.append(cycle)
    part.offloader = part.model.of = None  # type: ignore[assignment] # no module
    del cycle
    gc.collect()
    part.require_kept()


def run_the_cell_again(part: Part) -> None:
    part.offloader = part.make()
    part.offloader.offload()
    part.offloader.load()
    part.require_kept()


def make_another_and_keep_the_first(part: Part) -> None:
    first, part.offloader = part.offloader, part.make()
    assert first is not None
    part.offloader.offload()
    with pytest.raises(MemoryStateError, match=r"0.weight is offloaded by another Offloader"):
        first.offload()
    first.load()
    del first
    gc.collect()
    part.offloader.load()
    part.require_kept()


def make_one_of_a_part(part: Part) -> None:
    with pytest.raises(MemoryStateError, match="weight is offloaded by another Offloader"):
        Offloader(part.last, backend=BACKEND)
    gc.collect()
    assert part.offloader is not None
    part.offloader.load()
    other = Offloader(part.last, backend=BACKEND)
    other.offload()
    with pytest.raises(MemoryStateError, match="weight is offloaded by another Offloader"):
        part.offloader.offload()
    del other
    part.require_kept()


def fail_to_make_another(part: Part) -> None:
    with pytest.raises(MemoryStateError, match="neither is nor holds"):
        Offloader(part.model, object(), backend=BACKEND)
    gc.collect()
    assert part.offloader is not None
    part.offloader.load()
    part.require_kept()


def call_twice(part: Part) -> None:
    assert part.offloader is not None
    part.offloader.offload()
    part.offloader.load()
    part.offloader.load()
    part.offloader.close()
    part.offloader.close()
    part.require_kept()


def fork(part: Part) -> None:
    if (child := os.fork()) == 0:
        part.offloader = None
        os._exit(0 if all(map(torch.equal, part.tensors(), part.before)) else 1)  # autograd does not work after a fork
    assert os.waitpid(child, 0)[1] == 0
    drop(part)


def keep_aliases(part: Part) -> None:
    aliases = {name: one.detach() for name, one in part.model.named_parameters()} | {"data": part.first.weight.data}
    drop(part)
    torch.save([*aliases.values(), copy.deepcopy(aliases["data"])], file := io.BytesIO())
    file.seek(0)
    for read in torch.load(file, weights_only=True):
        assert read.shape in (aliases["data"].shape, part.norm.weight.shape)
    assert {type(alias) for alias in aliases.values()} == {torch.Tensor}


def drop_in_a_cycle_without_room(part: Part) -> None:
    part.offloader.cycle = part.offloader  # type: ignore[union-attr] # a reference to itself
    drop_without_room(part)


def drop_without_room(part: Part) -> None:
    assert part.offloader is not None
    current_stream = type(BACKEND).current_stream

    def refuse(backend: object) -> Any:
        raise RuntimeError("out of memory")

    type(BACKEND).current_stream = refuse  # type: ignore[method-assign, assignment] # fails on purpose
    part.offloader = None
    gc.collect()
    type(BACKEND).current_stream = current_stream  # type: ignore[method-assign] # the old one
    with pytest.raises(MemoryStateError, match="offloaded"):
        part.model(torch.ones(4, 16))
    part.offloader = part.make()
    part.require_kept()


ENDS = [
    drop,
    drop_in_a_cycle,
    run_the_cell_again,
    make_another_and_keep_the_first,
    make_one_of_a_part,
    fail_to_make_another,
    call_twice,
    fork,
    drop_without_room,
    drop_in_a_cycle_without_room,
    keep_aliases,
]

USES: dict[str, Callable[[Part], object]] = {
    "forward": lambda part: part.model(torch.ones(4, 16)),
    "forward of a layer": lambda part: part.last(torch.ones(4, 16)),
    "step": lambda part: part.optimizer.step(),
    "load an optimizer": lambda part: part.optimizer.load_state_dict({}),
    "deepcopy a model": lambda part: copy.deepcopy(part.model),
    "deepcopy an optimizer": lambda part: copy.deepcopy(part.optimizer),
    "move": lambda part: part.model.to(torch.float64),
    "half": lambda part: part.model.half(),
    "load": lambda part: part.model.load_state_dict({}),
    "save tensors": lambda part: torch.save(list(part.model.parameters()), io.BytesIO()),
    "save a model": lambda part: torch.save(part.model, io.BytesIO()),
    "save a state": lambda part: torch.save(part.model.state_dict(), io.BytesIO()),
    "save an optimizer": lambda part: torch.save(part.optimizer.state_dict(), io.BytesIO()),
    "save a state from before": lambda part: torch.save(part.state, io.BytesIO()),
    "copy a state from before": lambda part: copy.deepcopy(part.state),
    "save its storage": lambda part: torch.save(part.first.weight.untyped_storage(), io.BytesIO()),
    "pickle": lambda part: pickle.dumps(part.optimizer),
    "another optimizer": lambda part: another_step(part),
    "read": lambda part: part.first.weight.sum(),
    "read an alias": lambda part: part.first.weight.detach().clone(),
    "read data": lambda part: part.first.weight.data.mean(),
    "read as an array": lambda part: part.first.weight.detach().numpy(),
    "read a list": lambda part: part.first.weight.tolist(),
    "read a buffer": lambda part: next(part.norm.buffers()).sum(),
    "read a state": lambda part: part.optimizer.state[part.first.weight]["exp_avg"].sum(),
    "write": lambda part: nn.init.zeros_(part.first.weight),
    "print": lambda part: print(part.first.weight),
}


def another_step(part: Part) -> None:
    for parameter in part.model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    torch.optim.AdamW(part.model.parameters()).step()


def use(name: str) -> Callable[[Part], None]:
    def act(part: Part) -> None:
        with pytest.raises((MemoryStateError, pickle.PicklingError)):
            USES[name](part)
        part.model.zero_grad()
        shapes = [(one.shape, one.dtype, one.device, one.requires_grad) for one in part.model.parameters()]
        drop(part)
        assert shapes == [(one.shape, one.dtype, one.device, one.requires_grad) for one in part.model.parameters()]

    return act


def _failures(rank: int, acts: dict[str, Callable[[Part], None]]) -> list[str]:
    """Return the acts that failed. One that ends the process is the last that was printed."""
    failed = []
    for name, act in acts.items():
        print(name, flush=True)
        try:
            act(Part())
        except BaseException as exc:  # noqa: BLE001 - the test shows it
            failed.append(f"{name}: {type(exc).__name__}: {exc}")
    return failed


def _failed_ends(rank: int) -> list[str]:
    return _failures(rank, {act.__name__: act for act in ENDS})


def _failed_uses(rank: int) -> list[str]:
    return _failures(rank, {name: use(name) for name in USES})


def test_an_end_of_an_offloader_loses_nothing() -> None:
    assert run_processes(_failed_ends, 1)[0] == []


def test_a_use_of_offloaded_values_is_refused() -> None:
    assert run_processes(_failed_uses, 1)[0] == []
