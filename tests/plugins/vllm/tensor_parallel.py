"""A rollout process with two tensor-parallel workers, which are processes of their own: ``python -m ... MODEL``."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from hwrl.errors import EngineError
from hwrl.interfaces import LoraSettings
from tests.plugins.vllm.serving import Policy, engine_of, finish, generate, requests_of


def main(model_directory: Path) -> None:
    policy = Policy(model_directory)
    engine = engine_of(model_directory, tensor_parallel=2)
    for version in range(3):
        engine.load_weights(policy.change().items(), version=version)
        requests = requests_of(4)
        policy.check_greedy(requests, generate(engine, requests))
    worker, _ = multiprocessing.active_children()
    _check_adapter(model_directory)
    worker.kill()
    with pytest.raises(EngineError, match="version 3 was not loaded, and the version before is gone"):
        engine.load_weights(policy.change().items(), version=3)
    engine.submit(requests_of(1))
    with pytest.raises(EngineError, match="the engine has no weights"):
        engine.step()


def _check_adapter(model_directory: Path) -> None:
    lora, before = LoraSettings(rank=4, alpha=8.0), multiprocessing.active_children()
    policy, engine = Policy(model_directory, lora=lora), engine_of(model_directory, lora=lora, tensor_parallel=2)
    engine.load_base(policy.change().items(), base=1)
    for version in range(3):
        engine.load_adapter(policy.change_adapter().items(), version=version, base=1)
        requests = requests_of(4)
        policy.check_greedy(requests, generate(engine, requests))
    engine.submit(requests_of(2, new=40))
    engine.step()
    next(worker for worker in multiprocessing.active_children() if worker not in before).kill()
    with pytest.raises(EngineError, match="vLLM failed while generating; its 2 requests are dropped"):
        finish(engine)
    assert (engine.version, engine.base) == (-1, None)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
