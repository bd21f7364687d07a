"""The requests of ``hwrl scale`` to a run that does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.run.config import parse_config
from hwrl.run.run_directory import claimed_directory
from hwrl.run.scaling import ScaleRequest, ScaleRequests, request_replicas


def test_a_request_during_the_start_waits_for_the_run_and_one_from_before_is_removed(tmp_path: Path) -> None:
    settings = {"dir": tmp_path, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    config = parse_config({**settings, "reward": {"function": "m:f"}})
    request = tmp_path / "scale_request.json"
    request.write_text('{"request_id": "old", "replicas": 9}')
    with claimed_directory(config):
        assert ScaleRequests(tmp_path).poll() is None and not request.exists()
        request.write_text('{"request_id": "new", "replicas": 2}')
        for _ in range(2):  # the trainers die while the run begins, and it begins again
            requests = ScaleRequests(tmp_path)
        assert requests.poll() == ScaleRequest("new", 2)


def test_a_run_that_cannot_have_the_directory_leaves_the_requests_of_the_run_there(tmp_path: Path) -> None:
    request = tmp_path / "scale_request.json"
    request.write_text('{"request_id": "1", "replicas": 2}')
    (tmp_path / "model").mkdir()  # not from a run
    settings = {"dir": tmp_path, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    config = parse_config({**settings, "reward": {"function": "m:f"}})
    with pytest.raises(ConfigError, match="would overwrite model"), claimed_directory(config):
        pass
    assert ScaleRequests(tmp_path).poll() == ScaleRequest("1", 2)


def test_a_request_that_the_run_has_taken_is_not_said_to_be_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").touch()
    requests, clock = ScaleRequests(tmp_path), SimpleNamespace(now_s=0.0)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        requests.poll()  # the run takes it, and is slow

    monkeypatch.setattr("hwrl.run.scaling.time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    monkeypatch.setattr("hwrl.run.scaling.find_owner", lambda directory: "a run")
    with pytest.raises(RunDirectoryError, match=r"it has taken the request[\s\S]*look at its log for the outcome"):
        request_replicas(tmp_path, 2, timeout_s=5.0)
