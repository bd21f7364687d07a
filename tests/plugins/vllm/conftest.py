"""Fixtures for whole runs: a demo in ``tmp_path``, and a function to start ``hwrl train`` on it; models for engines."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hwrl.run.demo import write_demo
from tests.support.train_run import demo as demo
from tests.support.train_run import start as start

if TYPE_CHECKING:
    from tests.plugins.vllm.serving import Policy


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, of its own for each module."""
    return write_demo(tmp_path_factory.mktemp("demo"), seed=1, prompts=16).with_name("model")


@pytest.fixture(scope="module")
def policy(model_directory: Path) -> Policy:
    """transformers' model of ``model_directory``."""
    from tests.plugins.vllm.serving import Policy

    return Policy(model_directory)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Let Python free the engines of a module in its last test, and not after pytest's, where no mark counts."""
    yield
    gc.collect()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a test pass in which Python frees an engine of an earlier one: vLLM leaves its zmq context open."""
    item.add_marker(pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"))
