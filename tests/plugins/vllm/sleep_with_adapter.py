"""An engine with an adapter that sleeps, with any number of workers: ``python -m ... MODEL TENSOR_PARALLEL``.

A process of its own, since vLLM's sleep mode serves one engine in each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hwrl.errors import EngineError
from hwrl.lora import LoraSettings
from tests.plugins.vllm.serving import Policy, engine_of, generate, requests_of


def main(model_directory: Path, tensor_parallel: int) -> None:
    lora = LoraSettings(rank=8, alpha=16.0)
    policy = Policy(model_directory, lora=lora)
    engine = engine_of(model_directory, lora=lora, may_sleep=True, tensor_parallel=tensor_parallel)

    def check() -> None:
        requests = requests_of(4)
        policy.check_greedy(requests, generate(engine, requests))

    engine.load_base(policy.change().items(), base=1)
    engine.load_adapter(policy.change_adapter().items(), version=1, base=1)
    check()
    for version in (2, 4):
        engine.sleep(level=1)
        engine.wake()
        assert (engine.version, engine.base) == (version - 1, 1)
        check()
        engine.load_adapter(policy.change_adapter().items(), version=version, base=1)
        check()
        engine.sleep(level=2)
        engine.wake(["weights"])
        with pytest.raises(EngineError):
            engine.load_adapter(policy.change_adapter().items(), version=version + 1, base=1)
        engine.load_base(policy.change().items(), base=1)
        engine.load_adapter(policy.change_adapter().items(), version=version + 1, base=1)
        engine.wake(["kv_cache"])
        check()
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
