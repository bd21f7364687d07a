"""A rollout process that serves a mixture of experts: ``python -m ... MODEL TENSOR_PARALLEL [expert_parallel]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.plugins.vllm.serving import Policy, engine_of, generate, requests_of


def main(model_directory: Path, tensor_parallel: int, *options: str) -> None:
    policy = Policy(model_directory)
    given: dict[str, Any] = {f"enable_{option}": True for option in options}
    engine = engine_of(model_directory, tensor_parallel=tensor_parallel, **given)
    try:
        for version in range(3):
            engine.load_weights(policy.change().items(), version=version)
            requests = requests_of(4)
            policy.check_greedy(requests, generate(engine, requests))
    finally:
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
