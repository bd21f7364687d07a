"""vLLM's weight-transfer interface in several versions, as in its sources, and workers that call it as vLLM's do."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

VERSIONS = ("0.25", "0.26", "0.27", "0.28")
"""Those in which the interface changed. In 0.29 to 0.32 it has more methods, none of them abstract."""
_PACKAGE = "vllm.distributed.weight_transfer"


class _Engine(ABC):
    """What the worker's base class has in all versions."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def __class_getitem__(cls, parameters: Any) -> Any:
        return cls

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def update_weights(self, given: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**given))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class _EngineBefore28(_Engine):
    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class _Factory:
    def __init__(self) -> None:
        self._registry: dict[str, Callable[[], Any]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is registered")
        self._registry[name] = lambda: getattr(importlib.import_module(module), class_name)

    def create_engine(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> Any:
        return self._registry[config.backend]()(config, vllm_config, device, model)

    def trainer_init(self, init_info: Any, *, client: Any, source: Any) -> Any:
        return self._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)


def install(version: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let ``import vllm`` find the interface of ``version`` for the test; return the module of the factories."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", _PACKAGE)}
    base, factory = ModuleType(f"{_PACKAGE}.base"), ModuleType(f"{_PACKAGE}.factory")
    base.__dict__.update(
        WeightTransferEngine=_Engine if version == "0.28" else _EngineBefore28,
        WeightTransferInitInfo=type("WeightTransferInitInfo", (ABC,), {}),
        WeightTransferUpdateInfo=type("WeightTransferUpdateInfo", (ABC,), {}),
    )
    factory.__dict__.update(WeightTransferEngineFactory=_Factory())
    if version != "0.25":
        factory.__dict__.update(WeightTransferTrainerFactory=_Factory())
    for module in [*modules.values(), base, factory]:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.find_spec("hwrl_vllm.transfer")
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)  # of the base class above
    monkeypatch.setitem(sys.modules, spec.name, fresh)
    spec.loader.exec_module(fresh)
    return factory


class Worker:
    """One of ``of`` workers of vLLM with ``model``, as its ``gpu_worker.py`` calls the engine."""

    def __init__(self, factory: Any, model: Any, *, rank: int, of: int) -> None:
        parallel = SimpleNamespace(rank=rank, world_size=of, worker_cls=f"{__name__}:Worker")
        settings = SimpleNamespace(hf_config=model.config)
        config = SimpleNamespace(parallel_config=parallel, model_config=settings, additional_config={})
        self.model, self.is_updating = model, False
        self.engine = factory.WeightTransferEngineFactory.create_engine(
            SimpleNamespace(backend="hwrl"), config, torch.device("cpu"), model
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        assert not self.is_updating, "vLLM raises here, and with several workers it ends at the next call"
        self.engine.start_weight_update()
        self.is_updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.is_updating, "vLLM raises here"
        self.engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        assert self.is_updating, "vLLM raises here"
        self.engine.finish_weight_update()
        self.is_updating = False


Worker.update_weights.__module__ = "vllm.v1.worker.gpu_worker"


class Workers:
    """A client whose calls reach all ``workers`` at once, as JSON does."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, *given: Any) -> None:
        arguments = json.loads(json.dumps(given))
        one_by_one = "shapes" in arguments[0] if arguments else False  # transformers patches torch to make a model
        with ThreadPoolExecutor(1 if one_by_one else len(self.workers)) as threads:
            calls = [threads.submit(getattr(worker, method), *arguments) for worker in self.workers]
        for call in calls:
            call.result()
