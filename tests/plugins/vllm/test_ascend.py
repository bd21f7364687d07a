"""What hwrl uses of vllm-ascend is in its sources, of the newest and of the oldest version; they are only read."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hwrl.interfaces import ProbeContext
from hwrl_npu import vllm_traps
from hwrl_vllm.worker import WeightLoading

VERSIONS = ("0.23.0", "0.26.0rc1")
Source = Callable[[str], ast.Module]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="fetches 52 MB: make test-vllm"),
]


@pytest.fixture(scope="module", params=VERSIONS)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a version's package."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"-d{directory}"]
    command += ["--python-version=3.11", "--platform=manylinux_2_34_x86_64", f"vllm-ascend=={request.param}"]
    ended = subprocess.run(command, text=True, capture_output=True, timeout=2400, check=False)
    if ended.returncode:
        pytest.skip(f"vllm-ascend cannot be had: {ended.stderr.strip().splitlines()[-1]}")
    (file,) = directory.iterdir()
    with zipfile.ZipFile(file) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.endswith(".py")])
    return directory / "vllm_ascend"


@pytest.fixture(scope="module")
def source(wheel: Path) -> Source:
    """Return the syntax tree of a module of vllm-ascend."""
    return lambda module: ast.parse((wheel / f"{module}.py").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found(wheel: Path) -> vllm_traps.VllmAscend:
    """Return the version, as hwrl finds it."""
    spec = ModuleSpec("vllm_ascend", None, origin=str(wheel / "__init__.py"))
    installed = vllm_traps.VllmAscend.find(ProbeContext(find_spec=lambda _: spec))
    assert installed is not None
    return installed


def class_of(module: ast.Module, name: str) -> ast.ClassDef:
    (found,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def arguments(module: ast.Module, name: str, method: str) -> list[str]:
    (found,) = (
        node for node in class_of(module, name).body if isinstance(node, ast.FunctionDef) and node.name == method
    )
    return [argument.arg for argument in found.args.args]


def attributes(tree: ast.AST) -> set[str]:
    """Return the names of the attributes that are set or read on ``self``, and of methods."""
    read = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    return read | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def constants(tree: ast.AST) -> set[object]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_its_worker_has_what_hwrl_calls_and_nothing_that_hwrl_adds(source: Source) -> None:
    worker = source("worker/worker")
    assert arguments(worker, "NPUWorker", "sleep") == ["self", "level"]
    assert arguments(worker, "NPUWorker", "wake_up") == ["self", "tags"]
    names = attributes(class_of(worker, "NPUWorker"))
    assert {"model_runner", "model_config", "vllm_config"} <= names
    assert "_sleep_mode_backend" not in names, "it has no registry of sleep, so that hwrl leaves its own to it"
    assert not {name for name in dir(WeightLoading) if not name.startswith("__")} & names
    assert arguments(source("worker/model_runner_v1"), "NPUModelRunner", "get_model") == ["self"]


def test_its_platform_sleeps_and_chooses_that_worker(source: Source) -> None:
    platform = source("platform")
    assert arguments(platform, "NPUPlatform", "is_sleep_mode_available") == ["self"]
    assert "vllm_ascend.worker.worker.NPUWorker" in constants(platform)


def test_hwrl_reads_its_version_its_device_and_its_settings(found: vllm_traps.VllmAscend) -> None:
    assert ".".join(map(str, found.version)) in VERSIONS[0] + VERSIONS[1] and not found.is_310p
    assert found.knows("weight_nz_mode") and found.knows("enable_cpu_binding") and not found.knows("rl_config")


def test_it_transposes_experts_in_a_wake_in_the_versions_that_hwrl_refuses(
    source: Source, found: vllm_traps.VllmAscend
) -> None:
    worker = class_of(source("worker/worker"), "NPUWorker")
    (wake,) = (node for node in worker.body if isinstance(node, ast.FunctionDef) and node.name == "wake_up")
    use = vllm_traps.EngineUse(sleeps=True, experts=True)
    refused = [trap.what for trap in vllm_traps.traps({}, found, use)]
    assert ("transpose" in ast.unparse(wake)) is bool(refused)


def test_it_sets_what_hwrl_sets_before_it(source: Source) -> None:
    """The allocator's settings, the way between experts, the size of blocks, and the variable of its own transfer."""
    platform = constants(source("platform"))
    assert {"PYTORCH_NPU_ALLOC_CONF", "expandable_segments", "flashinfer_all2allv"} <= platform
    assert 128 in constants(source("utils"))
    assert "VLLM_ASCEND_ENABLE_NZ" in constants(source("envs"))


def test_it_sleeps_by_the_tags_that_hwrl_wakes(source: Source) -> None:
    assert {"weights", "kv_cache"} <= constants(source("worker/worker"))


def test_it_loads_layer_by_layer_as_hwrl_does(source: Source) -> None:
    """Its own update goes through the same functions of vLLM."""
    imported = {
        alias.name
        for node in ast.walk(source("worker/worker"))
        if isinstance(node, ast.ImportFrom) and "reload" in (node.module or "")
        for alias in node.names
    }
    assert {"initialize_layerwise_reload", "finalize_layerwise_reload"} <= imported
