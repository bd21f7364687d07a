"""Both ends of the backend "hwrl" beside stand-ins for vLLM: its interface of each version, and what fails in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hwrl.errors import CommError, ConfigError, EngineError
from hwrl.weights import WeightLayout, WeightSource
from hwrl_vllm import TransferTrainer, TransferTrainerInit, plugin
from tests.plugins.vllm import stand_in
from tests.plugins.vllm.stand_in import VERSIONS, Worker, Workers
from tests.support.speed import slow
from tests.support.tiny_model import tiny_model

MakeWorkers = Callable[..., Workers]


class ByName:
    """vLLM's loaders of a model with the parameters' names of its files. They raise an error if the model ``fails``."""

    def __init__(self, model: torch.nn.Module, **configs: Any) -> None:
        self._model = model

    def begin(self) -> None: ...

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        own = self._model.state_dict()
        with torch.no_grad():
            for number, (name, tensor) in enumerate(tensors):
                if getattr(self._model, "fails", False) and number == 3:
                    raise RuntimeError("no room for it")
                own[name].copy_(tensor)

    def finish(self) -> None: ...

    def cancel(self) -> None: ...

    def load_all(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.load(tensors)


@pytest.fixture
def factory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    monkeypatch.setattr("hwrl_vllm.loading.Reload", ByName)
    factory = stand_in.install(getattr(request, "param", "0.28"), monkeypatch)
    plugin.load()
    plugin.load()  # as vLLM does
    return factory


@pytest.fixture
def workers_of(factory: ModuleType) -> MakeWorkers:
    def make(count: int = 2, of: int = 2) -> Workers:
        return Workers([Worker(factory, tiny_model(9), rank=rank, of=of) for rank in range(count)])

    return make


def same(workers: Workers, model: torch.nn.Module) -> bool:
    wanted = model.state_dict()
    return all(torch.equal(t, wanted[n]) for one in workers.workers for n, t in one.model.state_dict().items())


def trainer_for(workers: Workers, model: torch.nn.Module, **settings: Any) -> TransferTrainer:
    """``timeout_s`` is long: workers are threads of this process, and its machine may be busy."""
    settings = {"timeout_s": 600.0, **settings}
    return TransferTrainer(TransferTrainerInit(**settings), client=workers, source=WeightSource.from_module(model))


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@pytest.mark.parametrize("factory", VERSIONS, indirect=True)
@pytest.mark.parametrize("keep_old_version", [True, False], ids=["staged", "in place"])
def test_two_workers_have_each_version(factory: ModuleType, workers_of: MakeWorkers, keep_old_version: bool) -> None:
    """The first staged version goes through the loaders, the others by copies."""
    workers, model = workers_of(), tiny_model()
    init_info = TransferTrainerInit(keep_old_version=keep_old_version)
    trainers = getattr(factory, "WeightTransferTrainerFactory", TransferTrainer)
    trainer = trainers.trainer_init(init_info, client=workers, source=vllms_source(model))
    for _ in range(3):
        trainer.send_weights()
        assert same(workers, model)
        change(model)
    assert [bool(one.engine.loading.copies) for one in workers.workers] == [keep_old_version] * 2
    trainer.shutdown()


def test_a_worker_shows_the_key_of_the_trainers_store_nowhere(
    workers_of: MakeWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = workers_of(1).workers
    given: Any = {"store": "127.0.0.1:99999#secret", "keep_old_version": True}  # no port has this number
    engine: Any = worker.engine
    worker.init_weight_transfer_engine(given)
    assert "cannot join the trainer at 127.0.0.1:99999\n" in caplog.text
    update = engine.update_info_cls(call=1, offer=given)
    assert "secret" not in f"{engine.parse_init_info(given)}{update}{caplog.text}"


def vllms_source(model: torch.nn.Module) -> Any:
    """A source as vLLM's ``ModuleSource``."""

    class Source:
        def metadata(self) -> list[Any]:
            return [SimpleNamespace(name=n, dtype=p.dtype, shape=tuple(p.shape)) for n, p in model.named_parameters()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from model.named_parameters()

    return Source()


def test_a_worker_that_cannot_stage_a_version_leaves_the_old_one_in_all_of_them(
    workers_of: MakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, model = workers_of(), tiny_model()
    full: list[str] = []
    loading = workers.workers[1].engine.loading
    stage = loading.stage

    def stage_if_room(layout: WeightLayout) -> Any:
        if full:
            raise torch.OutOfMemoryError(*full)
        return stage(layout)

    monkeypatch.setattr(loading, "stage", stage_if_room)
    trainer = trainer_for(workers, model, timeout_s=slow(2.0))
    trainer.send_weights()
    old = tiny_model()
    old.load_state_dict(model.state_dict())
    change(model)
    full.append("the device is full")
    with pytest.raises(EngineError, match="rank 1: OutOfMemoryError: the device is full"):
        trainer.send_weights()
    full.clear()
    assert trainer.has_whole_version and same(workers, old) and not any(one.is_updating for one in workers.workers)
    trainer.send_weights()
    assert same(workers, model)


def test_a_load_that_fails_says_that_weights_are_mixed_and_the_next_one_repairs_them(workers_of: MakeWorkers) -> None:
    workers, model = workers_of(), tiny_model()
    broken = workers.workers[1].model
    broken.fails = True
    trainer = trainer_for(workers, model)
    with pytest.raises(EngineError, match=r"weights are of two versions(.|\n)*rank 1: RuntimeError: no room for it"):
        trainer.send_weights()
    assert not trainer.has_whole_version
    broken.fails = False
    trainer.send_weights()
    assert same(workers, model) and trainer.has_whole_version


def test_a_transfer_in_place_that_fails_leaves_no_whole_version(workers_of: MakeWorkers) -> None:
    workers, model = workers_of(), tiny_model()
    broken = workers.workers[1].model
    trainer = trainer_for(workers, model, keep_old_version=False, timeout_s=slow(2.0))
    for fails in (True, False):
        broken.fails = fails
        with pytest.raises(EngineError, match="weights are of two versions") if fails else nullcontext():
            trainer.send_weights()
        assert trainer.has_whole_version != fails
    assert same(workers, model)


def test_a_trainer_whose_predecessor_died_in_an_update_goes_on(workers_of: MakeWorkers) -> None:
    workers, model = workers_of(), tiny_model()
    trainer_for(workers, model)
    workers.start_weight_update()
    trainer_for(workers, model).send_weights()
    assert same(workers, model)


@pytest.mark.parametrize("call", ["start_weight_update", "finish_weight_update"])
@pytest.mark.parametrize("is_done", [True, False], ids=["answer lost", "request lost"])
def test_a_lost_call_that_begins_or_ends_an_update_loses_no_version(
    workers_of: MakeWorkers, monkeypatch: pytest.MonkeyPatch, call: str, is_done: bool
) -> None:
    workers, model = workers_of(), tiny_model()
    trainer, original = trainer_for(workers, model), getattr(workers, call)

    def lose() -> None:
        monkeypatch.setattr(workers, call, original)
        if is_done:
            original()
        raise EngineError("the server did not answer", why="the connection was reset", fix="")

    for _ in range(2):
        change(model)
        monkeypatch.setattr(workers, call, lose)
        trainer.send_weights()
        assert same(workers, model) and not any(one.is_updating for one in workers.workers)
    change(model)
    trainer.send_weights()
    assert same(workers, model)


def test_a_missing_worker_is_noticed_before_anything_is_sent(workers_of: MakeWorkers) -> None:
    with pytest.raises(EngineError, match=r"not all of vLLM's workers have joined(.|\n)*only these have: \[0\]"):
        trainer_for(workers_of(count=1, of=2), tiny_model(), timeout_s=slow(2.0))


def test_a_worker_that_cannot_reach_the_trainer_raises_nothing(
    workers_of: MakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(address: str) -> Any:
        raise CommError("no way", why="the network is down", fix="")

    workers = workers_of(count=1, of=1)
    monkeypatch.setattr(sys.modules["hwrl_vllm.transfer"], "connect_store", unreachable)
    workers.init_weight_transfer_engine({"store": "127.0.0.1:1"})
    workers.start_weight_update()
    workers.update_weights({"call": 1})
    workers.finish_weight_update()


def test_each_rank_reads_its_weights_once_whatever_fails(
    workers_of: MakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading is collective: a rank that read more or less often would hang the others."""

    def refuse() -> None:
        raise EngineError("no more updates", why="a test", fix="none")

    model, reads = tiny_model(), [0, 0]

    def source_of(rank: int) -> WeightSource:
        def read() -> Iterator[tuple[str, torch.Tensor]]:
            reads[rank] += 1
            yield from model.named_parameters()

        return WeightSource(model.named_parameters, read)

    workers = workers_of()
    first, second = (
        TransferTrainer(TransferTrainerInit(rank=rank), client=workers, source=source_of(rank)) for rank in (0, 1)
    )
    for updating in (False, True):  # the second update fails before anything is read
        if updating:
            monkeypatch.setattr(workers, "start_weight_update", refuse)
            with pytest.raises(EngineError, match="no more updates"):
                first.send_weights()
        else:
            first.send_weights()
        second.send_weights()
    assert reads == [2, 2]


# -- a worker that cannot be updated says so when it starts ------------------------------------------------------------


def make_worker(factory: ModuleType, additional_config: dict[str, Any] | None) -> object:
    parallel = SimpleNamespace(worker_cls=f"{stand_in.__name__}:Worker")
    config = SimpleNamespace(parallel_config=parallel, model_config=None, additional_config=additional_config)
    given = (SimpleNamespace(backend="hwrl"), config, torch.device("cpu"), tiny_model(9))
    return factory.WeightTransferEngineFactory.create_engine(*given)


def test_a_vllm_without_a_setting_for_live_updates_is_refused(
    factory: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend demands ``weight_nz_mode=0`` at the first update only, and its pages do not say so."""
    transfer = sys.modules["hwrl_vllm.transfer"]
    needs = {"weight_nz_mode": 0}

    def engine_args(framework: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"additional_config": needs | options["additional_config"]}

    monkeypatch.setattr(transfer, "engine_args", engine_args)
    assert make_worker(factory, {"weight_nz_mode": 0, "another": 1})
    for given in ({"another": 1}, None):
        with pytest.raises(ConfigError, match=r"start vLLM with --additional-config '{\"weight_nz_mode\": 0"):
            make_worker(factory, given)


def test_a_worker_that_calls_backends_in_its_own_way_is_refused_by_name(
    factory: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NPUWorker of vllm-ascend 0.26 passes a loader to ``receive_weights``, and tells no start and no end."""
    monkeypatch.setattr(stand_in.Worker.update_weights, "__module__", "vllm_ascend.worker.worker")
    with pytest.raises(ConfigError, match=r"stand_in\.Worker calls weight-transfer backends in another way than vLLM"):
        make_worker(factory, {})


def test_a_worker_of_an_older_vllm_is_refused_by_name(factory: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """NPUWorker of vllm-ascend 0.23 passes the parallel settings and the model only."""

    def __init__(self: Any, config: Any, parallel_config: Any, model: Any) -> None:
        self.parallel_config = parallel_config

    transfer = sys.modules["hwrl_vllm.transfer"]
    monkeypatch.setattr(transfer.WeightTransferEngine, "__init__", __init__)
    with pytest.raises(ConfigError, match=r"use vLLM 0\.25 or newer"):
        transfer.TransferWorker(None, SimpleNamespace(rank=0), tiny_model(9))
