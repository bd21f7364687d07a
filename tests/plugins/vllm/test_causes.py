"""The errors of vLLM's processes, as the rollout process reports them; needs no vLLM."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hwrl.errors import ConfigError, EngineError, HwrlError
from hwrl.interfaces import RolloutSettings
from hwrl_vllm import causes, starting
from hwrl_vllm.causes import CAUSES, Causes

SETTINGS = RolloutSettings(model_directory=Path("/m"), dtype=torch.float32, eos_ids=[1], max_running=8, max_length=64)
CHILD = """
import logging, os, sys
from hwrl_vllm.orphans import end_with_owner
os.environ["HWRL_VLLM_OWNER"] = str(os.getppid())
end_with_owner()
try:
    exec(sys.argv[1])
except Exception:
    logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
"""


def fail_in_child(code: str) -> None:
    subprocess.run([sys.executable, "-c", CHILD, code], check=True, capture_output=True)
    raise RuntimeError("Engine core initialization failed. See root cause above.")


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        ("raise ValueError('raise kv_cache_memory_bytes')", ConfigError, "ValueError: raise kv_cache_memory_bytes"),
        ("raise RuntimeError('no such kernel')", EngineError, "RuntimeError: no such kernel"),
        ("raise RuntimeError('NPU out of memory')", torch.OutOfMemoryError, "NPU out of memory"),
        ("import torch; raise torch.OutOfMemoryError('tried 1 GiB')", torch.OutOfMemoryError, "tried 1 GiB"),
        ("", EngineError, "RuntimeError: Engine core initialization failed"),
    ],
)
def test_a_failed_start_is_told_with_the_error_of_vllms_process(
    code: str, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = start_that_fails(code, monkeypatch)
    assert type(found) is kind and told in str(found)
    if isinstance(found, ConfigError):
        assert found.fix == "correct rollout.engine_options.kv_cache_memory_bytes"


def start_that_fails(code: str, monkeypatch: pytest.MonkeyPatch) -> Exception:
    for name in (CAUSES, "HWRL_VLLM_OWNER", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")  # so that its value comes back
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(starting, "_make", lambda *args, **options: fail_in_child(code))
    errors = Causes()
    with pytest.raises((HwrlError, torch.OutOfMemoryError)) as raised:
        starting.start_vllm(SETTINGS, {"kv_cache_memory_bytes": 1}, inline=False, causes=errors)
    errors.close()
    return raised.value


@pytest.mark.parametrize(
    ("given", "wanted"), [("", ",hwrl"), ("ascend", "ascend,hwrl"), ("hwrl,ascend", "hwrl,ascend")]
)
def test_a_users_choice_of_vllms_plugins_keeps_hwrls(given: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", given)
    start_that_fails("", monkeypatch)
    assert os.environ["VLLM_PLUGINS"] == wanted


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """vLLM's, whose handlers the test may add to."""
    monkeypatch.setenv(CAUSES, "")
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    return logging.getLogger("vllm.worker")


def log(logger: logging.Logger, error: Exception) -> None:
    logger.error("it failed", exc_info=error)


def test_errors_are_told_once_each_oldest_first(logger: logging.Logger) -> None:
    errors = Causes()
    causes.report_errors()
    logger.error("no exception")
    log(logger, IndexError("row\n9"))
    log(logger, RuntimeError("a worker failed"))
    log(logger, RuntimeError("a worker failed"))
    own = ValueError("see above")
    cause = errors.of(own)
    assert cause.text == "IndexError: row\n9; then RuntimeError: a worker failed"
    assert "LookupError" in cause.kinds and not cause.is_of_a_value and not cause.is_out_of_memory
    assert errors.of(own).text == "ValueError: see above", "what was told is not told again"
    log(logger, IndexError("survived"))
    errors.clear()
    assert errors.of(own).is_of_a_value
    errors.close()
    log(logger, IndexError("nobody reads this"))
    assert errors.of(own).text == "ValueError: see above"
