"""The requests of ``hwrl scale`` to a run that does not answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwrl.checkpoint import DirectoryLock
from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.run.config import Config, parse_config
from hwrl.run.run_directory import claimed_directory, record_replicas
from hwrl.run.scaling import ScaleRequest, ScaleRequests, request_replicas
from tests.support.speed import slow


def config_of(directory: Path) -> Config:
    settings = {"dir": directory, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    return parse_config({**settings, "reward": {"function": "m:f"}})


def test_a_request_during_the_start_waits_for_the_run_and_one_from_before_is_removed(tmp_path: Path) -> None:
    old = tmp_path / "scale_request.old.json"
    old.write_text('{"replicas": 9}')
    with claimed_directory(config_of(tmp_path)):
        assert ScaleRequests(tmp_path).poll() is None and not old.exists()
        (tmp_path / "scale_request.new.json").write_text('{"replicas": 2}')
        for _ in range(2):  # the trainers die while the run begins, and it begins again
            requests = ScaleRequests(tmp_path)
        assert requests.poll() == ScaleRequest("new", 2)


def test_a_run_that_cannot_have_the_directory_leaves_the_requests_of_the_run_there(tmp_path: Path) -> None:
    (tmp_path / "scale_request.1.json").write_text('{"replicas": 2}')
    (tmp_path / "model").mkdir()  # not from a run
    with pytest.raises(ConfigError, match="would overwrite model"), claimed_directory(config_of(tmp_path)):
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


def scaled(directory: Path, scale: Callable[[int], str]) -> tuple[dict[str, Any], list[str]]:
    """Carry out a request of 2 replicas; return the answer and the log."""
    logged: list[str] = []
    record = partial(record_replicas, config_of(directory))
    ScaleRequests(directory).carry_out(ScaleRequest("1", 2), scale=scale, record=record, log=logged.append)
    return json.loads((directory / "scale_answer.1.json").read_text()), logged


def test_a_run_that_has_scaled_says_so_even_if_its_configuration_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    answer, logged = scaled(tmp_path, lambda count: f"1 → {count} replicas")
    assert answer["error"] is None and answer["text"].splitlines() == logged
    outcome, warning = logged
    assert outcome == "1 → 2 replicas"
    assert warning.startswith("warning: ") and "config.yaml cannot be written" in warning and "a resumed" in warning


def test_a_run_that_has_not_scaled_answers_with_the_reason(tmp_path: Path) -> None:
    def refuse(count: int) -> str:
        raise ConfigError("there are no devices")

    answer, logged = scaled(tmp_path, refuse)
    assert answer["error"]["what"] == "there are no devices" and logged == []
    assert not (tmp_path / "config.yaml").exists()


def test_each_sender_gets_its_own_answer_and_withdraws_only_its_own_request(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    lock, requests = DirectoryLock(tmp_path), ScaleRequests(tmp_path)
    taken: list[ScaleRequest] = []
    with ThreadPoolExecutor(3) as senders:
        impatient = senders.submit(request_replicas, tmp_path, 2, timeout_s=slow(0.3))
        while not list(tmp_path.glob("scale_request*.json")):
            assert not impatient.done()
        others = [senders.submit(request_replicas, tmp_path, number, timeout_s=600.0) for number in (3, 4)]
        with pytest.raises(RunDirectoryError, match="the request is withdrawn"):
            impatient.result(timeout=600)
        while len(taken) < 2:
            assert not any(other.done() for other in others)
            if (request := requests.poll()) is not None:
                taken.append(request)
        for request in taken:
            requests.answer(request, text=f"{request.replicas} replicas")
        assert [other.result(timeout=600) for other in others] == ["3 replicas", "4 replicas"]
    lock.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hwrl.lock", "config.yaml"]


def test_requests_are_taken_in_their_order(tmp_path: Path) -> None:
    for number, name in enumerate("cab"):
        path = tmp_path / f"scale_request.{name}.json"
        path.write_text(f'{{"replicas": {number + 1}}}')
        os.utime(path, ns=(0, number))
    (tmp_path / "scale_request.0.json").mkdir()  # cannot be removed, and holds up nobody
    requests = ScaleRequests(tmp_path)
    assert [requests.poll() for _ in range(4)] == [*(ScaleRequest(name, 1 + "cab".index(name)) for name in "cab"), None]


def test_a_request_that_is_withdrawn_while_the_run_reads_it_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scale_request.1.json"
    path.write_text('{"replicas": 2}')

    def withdraw_and_parse(content: bytes) -> object:
        path.unlink()
        return json.loads(content)

    monkeypatch.setattr("hwrl.run.scaling.json", SimpleNamespace(loads=withdraw_and_parse))
    assert ScaleRequests(tmp_path).poll() is None
