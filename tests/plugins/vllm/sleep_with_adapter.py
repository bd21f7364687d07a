"""An engine with an adapter that sleeps, with any number of workers: ``python -m ... MODEL TENSOR_PARALLEL``.

A process of its own, since vLLM's sleep mode serves one engine in each. On the CPU, where vLLM has no sleep mode, what
one of level 2 loses is overwritten instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.errors import EngineError
from hwrl.interfaces import LoraSettings
from hwrl_vllm.engine import VllmEngine
from hwrl_vllm.lora import keep_indices
from tests.plugins.vllm.serving import ON_HOST, Policy, engine_of, generate, requests_of


def lose(worker: Any) -> int:
    """Overwrite what a layer of the model holds, but for its buffers, which vLLM keeps; return how many tensors."""
    model = worker.model_runner.get_model()
    keep_indices(model)
    lost = 0
    for module in model.modules():
        held = {**vars(module), **module._parameters}
        held.pop("kv_cache", None)
        for value in held.values():
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
                    lost += 1
    return lost


def sleep(engine: VllmEngine, *, level: int) -> None:
    if not ON_HOST:
        engine.sleep(level=level)
    elif level == 2:
        assert all(lost > 20 for lost in engine.core.call_workers(lose))
        engine.version, engine.base = -1, None


def wake(engine: VllmEngine, *tags: str) -> None:
    if not ON_HOST:
        engine.wake(tags)


def main(model_directory: Path, tensor_parallel: int) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for a function as the workers' method
    lora = LoraSettings(rank=8, alpha=16.0)
    policy = Policy(model_directory, lora=lora)
    engine = engine_of(model_directory, lora=lora, free_cache_engine=not ON_HOST, tensor_parallel=tensor_parallel)

    def check() -> None:
        requests = requests_of(4)
        policy.check_greedy(requests, generate(engine, requests))

    engine.load_base(policy.change().items(), base=1)
    engine.load_adapter(policy.change_adapter().items(), version=1, base=1)
    check()
    for version in (2, 4):
        sleep(engine, level=1)
        wake(engine, "weights", "kv_cache")
        assert (engine.version, engine.base) == (version - 1, 1)
        check()
        engine.load_adapter(policy.change_adapter().items(), version=version, base=1)
        check()
        sleep(engine, level=2)
        wake(engine, "weights")
        with pytest.raises(EngineError):
            engine.load_adapter(policy.change_adapter().items(), version=version + 1, base=1)
        engine.load_base(policy.change().items(), base=1)
        engine.load_adapter(policy.change_adapter().items(), version=version + 1, base=1)
        wake(engine, "kv_cache")
        check()
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
