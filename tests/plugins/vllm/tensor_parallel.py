"""A rollout process with two tensor-parallel workers, which are processes of their own: ``python -m ... MODEL``."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
    _check_adapter(model_directory)
    os.kill(_children(_core_pid())[0], signal.SIGKILL)  # a worker
    with pytest.raises(EngineError, match=r"version 3 was not loaded|finishing a step before an update"):
        engine.load_weights(policy.change().items(), version=3)
    engine.submit(requests_of(1))
    with pytest.raises(EngineError, match="the engine has no weights"):
        engine.step()
    engine.close()


def _core_pid() -> int:
    (core,) = (child for child in multiprocessing.active_children() if child.name == "EngineCore")
    assert core.pid is not None
    return core.pid


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _check_adapter(model_directory: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8.0)
    policy = Policy(model_directory, lora=lora)
    engine = engine_of(model_directory, lora=lora, tensor_parallel=2, engine_core="inline")
    engine.load_base(policy.change().items(), base=1)
    for version in range(3):
        engine.load_adapter(policy.change_adapter().items(), version=version, base=1)
        requests = requests_of(4)
        policy.check_greedy(requests, generate(engine, requests))
    engine.submit(requests_of(2, new=40))
    engine.step()
    next(child for child in multiprocessing.active_children() if child.name != "EngineCore").kill()
    with pytest.raises(EngineError, match="vLLM failed while generating; its 2 requests are dropped"):
        finish(engine)
    assert (engine.version, engine.base) == (-1, None)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
