"""The Ray that a run joins or starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from hwrl.checkpoint.lock import DirectoryLock
from hwrl.errors import ConfigError
from hwrl.run.cluster import ray_cluster
from hwrl.run.config import load_config
from hwrl.run.demo import main, write_demo
from hwrl.run.inputs import is_local


def test_a_cluster_that_does_not_answer_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    says = rf"(?s)no Ray cluster at 127.0.0.1:{port}.*unset RAY_ADDRESS"
    with pytest.raises(ConfigError, match=says), ray_cluster(config, say=print):
        pass


@pytest.mark.parametrize(("address", "local"), [("", True), ("local", True), ("elsewhere:6379", False)])
def test_an_address_decides_if_a_ray_is_started(address: str, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert is_local() is local


def test_the_demo_is_not_written_under_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(sys, "argv", ["demo", str(tmp_path)])
    lock = DirectoryLock(tmp_path / "run")
    with pytest.raises(SystemExit, match="a run is going on"):
        main()
    lock.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
