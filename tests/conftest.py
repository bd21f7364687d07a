from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from hwrl.testing import preload
from tests.support import speed  # noqa: F401 - it measures this machine, and tells the processes of the tests
from tests.support.order import long_ones_first

gc.disable()  # it takes a quarter of the time of the imports, until the tests are collected

# Every test runs on the reference backend, on every machine, unless the caller names another one.
os.environ.setdefault("HWRL_BACKEND", "cpu")

if importlib.util.find_spec("hypothesis"):  # not in the environments of other stacks
    from hypothesis import HealthCheck, settings

    # On a slow machine an example takes longer than it allows.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

# Most tests start processes that import their test module; without this each spends one to three seconds on imports.
preload(
    "pytest",
    "hypothesis",
    "safetensors.torch",
    "hwrl.checkpoint.manager",
    "hwrl.testing.suites.backend",
    "hwrl.weights",
)
if os.environ["HWRL_BACKEND"] == "cpu":
    preload("transformers.models.qwen3.modeling_qwen3", "hwrl.rollout.embedded", "hwrl.train.fsdp")
    preload("torch._inductor.compile_fx")  # most of the time that the import of Megatron-core takes
elif importlib.util.find_spec("torch_npu"):
    preload("torch_npu")  # alone, it opens its device on first use; the models of transformers count the devices
    preload("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "transformers.models")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import nothing but tests: what they start elsewhere may prepare its process on import, as ``verl/on_cpu.py``."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_helper else None  # None lets others decide


@pytest.hookimpl(trylast=True)  # after the tests that the command line deselects are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = long_ones_first(items, workers=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_collection_finish() -> None:
    """Let the collector work again, and never visit what the imports of the tests have made."""
    gc.freeze()
    gc.enable()


class FailuresAtOnce:
    """Names each failed test when it fails: the whole takes minutes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Give each process with tests a simulated NPU machine: tests look at how much memory a device has left."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if importlib.util.find_spec("torch_npu") and "NPUSIM_NODE" not in os.environ and not starts_workers:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        node = os.environ["NPUSIM_NODE"] = f"/dev/shm/npusim-{os.getuid()}-{worker}-{os.getpid()}"
        config.add_cleanup(lambda: Path(node).unlink(missing_ok=True))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test that leaves torch without gradients: every later test of the process would compute without them."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail(f"{item.nodeid} leaves torch with gradients switched off")
