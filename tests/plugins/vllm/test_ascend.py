"""What hwrl uses of vllm-ascend is in its sources, of the version for vLLM 0.23; they are fetched, and only read."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable

import pytest

import hwrl_npu
from hwrl_vllm.worker import WeightLoading

VERSION = "0.23.0"
Source = Callable[[str], ast.Module]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="fetches 27 MB: make test-vllm"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Return the syntax tree of a module of vllm-ascend."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"-d{directory}"]
    command += ["--python-version=3.11", "--platform=manylinux_2_34_x86_64", f"vllm-ascend=={VERSION}"]
    ended = subprocess.run(command, text=True, capture_output=True, timeout=2400, check=False)
    if ended.returncode:
        pytest.skip(f"vllm-ascend cannot be had: {ended.stderr.strip().splitlines()[-1]}")
    (wheel,) = directory.iterdir()

    def read(module: str) -> ast.Module:
        with zipfile.ZipFile(wheel) as archive:
            return ast.parse(archive.read(f"vllm_ascend/{module}.py"))

    return read


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


def test_it_knows_the_engine_arguments_of_the_npu_backend(source: Source) -> None:
    given = hwrl_npu.hwrl_engine_args("vllm")
    assert given is not None and given.keys() == {"additional_config"}
    assert given["additional_config"].keys() <= constants(source("ascend_config"))


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
