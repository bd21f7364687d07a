"""No end of an offloader loses data, and no use of what it holds ends the process. Each case runs in a child."""

from __future__ import annotations

import copy
import functools
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
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)


class Part:
    """A trained model with a tied weight and a buffer, its optimizer, an offloader that holds both, their values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False))
        self.model[2].weight = self.model[0].weight  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(4, 16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
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
    part.model.of = part.offloader  # type: ignore[assignment]
    cycle: list[Any] = [part.offloader]
    cycle.append(cycle)
    part.offloader = part.model.of = None  # type: ignore[assignment]
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
        Offloader(part.model[2], backend=BACKEND)
    gc.collect()
    assert part.offloader is not None
    part.offloader.load()
    other = Offloader(part.model[2], backend=BACKEND)
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
        part.require_kept()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    drop(part)


def drop_without_room(part: Part) -> None:
    assert part.offloader is not None
    current_stream = type(BACKEND).current_stream

    def refuse(backend: object) -> Any:
        raise RuntimeError("out of memory")

    type(BACKEND).current_stream = refuse  # type: ignore[method-assign, assignment]
    part.offloader = None
    type(BACKEND).current_stream = current_stream  # type: ignore[method-assign]
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
]

USES: dict[str, Callable[[Part], object]] = {
    "deepcopy a model": lambda part: copy.deepcopy(part.model),
    "deepcopy an optimizer": lambda part: copy.deepcopy(part.optimizer),
    "move": lambda part: part.model.to(torch.float64),
    "half": lambda part: part.model.half(),
    "load": lambda part: part.model.load_state_dict({}),
    "save tensors": lambda part: torch.save(list(part.model.parameters()), io.BytesIO()),
    "save a model": lambda part: torch.save(part.model, io.BytesIO()),
    "save a state": lambda part: torch.save(part.model.state_dict(), io.BytesIO()),
    "save an optimizer": lambda part: torch.save(part.optimizer.state_dict(), io.BytesIO()),
    "pickle": lambda part: pickle.dumps(part.optimizer),
    "another optimizer": lambda part: another_step(part),
    "read": lambda part: part.model[0].weight.sum(),
    "read an alias": lambda part: part.model[0].weight.detach().clone(),
    "read data": lambda part: part.model[0].weight.data.mean(),
    "read as an array": lambda part: part.model[0].weight.detach().numpy(),
    "read a list": lambda part: part.model[0].weight.tolist(),
    "read a buffer": lambda part: part.model[1].running_mean.sum(),  # type: ignore[union-attr, operator]
    "read a state": lambda part: part.optimizer.state[part.model[0].weight]["exp_avg"].sum(),
    "write": lambda part: nn.init.zeros_(part.model[0].weight),
    "print": lambda part: print(part.model[0].weight),
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


@pytest.mark.parametrize("act", [pytest.param(act, id=act.__name__) for act in ENDS])
def test_an_end_of_an_offloader_loses_nothing(act: Callable[[Part], None]) -> None:
    _run_in_child(act)


@pytest.mark.parametrize("name", USES)
def test_a_use_of_offloaded_values_is_refused(name: str) -> None:
    _run_in_child(use(name))


@functools.cache
def _import_all() -> None:
    """Import what torch imports at a first step, once and not in each child."""
    drop(Part())


def _run_in_child(act: Callable[[Part], None]) -> None:
    _import_all()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            act(Part())
        except BaseException as exc:  # noqa: BLE001 - the parent shows it
            os.write(write, f"{type(exc).__name__}: {exc}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        error = told.read()
    assert (os.waitpid(child, 0)[1], error) == (0, "")
