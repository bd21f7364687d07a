"""Whole weights out of a sharded model: on two real ranks, read again, and given up half way."""

import itertools
from pathlib import Path

import pytest
import torch

import hwrl
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.interfaces import EngineSettings
from hwrl.run.demo import write_demo
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine
from hwrl.weights import WeightSource
from hwrl.weights.ranks import on_rank_0, read_together
from hwrl.weights.source import gathered


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=3, prompts=16)
    return directory / "model"


def settings_for(model_directory: Path) -> EngineSettings:
    return EngineSettings(model_directory=model_directory, learning_rate=1e-3, total_steps=1)


def _read(rank: int, model_directory: Path, address: str) -> dict[str, torch.Tensor]:
    backend = hwrl.get_backend()
    backend.set_device(rank % backend.device_count())
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2) as group:
        engine = FsdpEngine(settings_for(model_directory), backend=backend, group=group)
        everything = WeightSource(engine.weights_metadata, engine.named_weights)
        whole: dict[str, torch.Tensor] = {}

        def lead() -> None:
            given_up = read_together(group, everything)
            assert len(list(itertools.islice(given_up, 3))) == 3
            given_up.close()  # type: ignore[attr-defined]  # it is a generator
            first = dict(read_together(group, everything))
            whole.update(read_together(group, everything))
            assert first.keys() == whole.keys()
            described = {name: (tensor.shape, tensor.dtype) for name, tensor in everything.metadata()}
            assert described == {name: (tensor.shape, tensor.dtype) for name, tensor in first.items()}

        def follow(number: int) -> None:
            assert list(gathered(everything, None)) == []

        on_rank_0(group, "read", lead, follow=follow)
        return {name: tensor.cpu() for name, tensor in whole.items()}


def test_the_first_rank_reads_whole_weights_as_often_as_it_likes(model_directory: Path) -> None:
    store = serve_store()
    whole, nothing = run_processes(_read, 2, model_directory, store_address(store))
    assert nothing == {}
    backend = hwrl.get_backend()
    alone = FsdpEngine(settings_for(model_directory), backend=backend, group=None)
    wanted = {name: tensor.cpu() for name, tensor in alone.named_weights()}
    assert whole.keys() == wanted.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in wanted.items())
