from __future__ import annotations

import importlib.util
import os

from hwrl.testing.processes import preload

# Every test runs on the reference backend, on every machine, unless the caller names another one.
os.environ.setdefault("HWRL_BACKEND", "cpu")

# Most tests start processes that import their test module; without this each spends one to three seconds on imports.
preload("pytest", "hypothesis", "safetensors.torch", "hwrl.checkpoint", "hwrl.testing.suite", "hwrl.weights")
if importlib.util.find_spec("torch_npu"):
    preload("torch_npu")  # alone, it opens its device on first use; transformers counts the devices when it is imported
    # Tests look at how much memory a device has left, so each worker of pytest-xdist has a simulated machine to itself.
    os.environ["NPUSIM_NODE"] = f"/dev/shm/npusim-{os.getuid()}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
else:
    preload("transformers.models.qwen3.modeling_qwen3", "hwrl.rollout.embedded", "hwrl.train.fsdp")
