"""The file of ``hwrl scale``: a request and its answer, and runs that do not answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hwrl.checkpoint import DirectoryLock
from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.run.fleet import Fleet
from hwrl.run.run_directory import claimed_directory
from hwrl.run.scaling import SCALE, answer_request, pending_request, request_replicas
from tests.support.run_config import config_of
from tests.support.speed import slow


def request_in(directory: Path, content: str = '{"id": "1", "replicas": 2}') -> Path:
    path = directory / SCALE
    path.write_text(content)
    return path


def test_a_request_during_the_start_waits_for_the_run_and_one_from_before_is_removed(tmp_path: Path) -> None:
    old = request_in(tmp_path)
    with claimed_directory(config_of(tmp_path)):
        assert pending_request(tmp_path) is None and not old.exists()
        request_in(tmp_path)
        assert pending_request(tmp_path) == pending_request(tmp_path) == {"id": "1", "replicas": 2}


def test_a_run_that_cannot_have_the_directory_leaves_the_request_to_the_run_there(tmp_path: Path) -> None:
    request_in(tmp_path)
    (tmp_path / "model").mkdir()  # not from a run
    with pytest.raises(ConfigError, match="would overwrite model"), claimed_directory(config_of(tmp_path)):
        pass
    assert pending_request(tmp_path) is not None


def scaled(directory: Path, *, refusal: ConfigError | None = None) -> tuple[dict[str, Any], list[str]]:
    """Let a run of one replica carry out a request of 2 replicas; return the answer and the log."""
    logged: list[str] = []

    def scale(count: int) -> str:
        if refusal is not None:
            raise refusal
        return "replica-1 will join"

    fleet = SimpleNamespace(
        replicas=SimpleNamespace(wanted=1, scale=scale),
        _config=config_of(directory),
        _log=lambda text, kind: logged.append(text),
    )
    Fleet.carry_out(cast(Any, fleet), {"id": "1", "replicas": 2})
    assert pending_request(directory) is None, "it is carried out once"
    return json.loads((directory / SCALE).read_text()), logged


def test_a_run_that_has_scaled_says_so_even_if_its_configuration_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    answer, logged = scaled(tmp_path)
    assert answer["error"] is None and answer["answer"].splitlines() == logged
    outcome, warning = logged
    assert outcome == "1 → 2 replicas: replica-1 will join"
    assert warning.startswith("warning: ") and "config.yaml cannot be written" in warning and "a resumed" in warning


def test_a_run_that_has_not_scaled_answers_with_the_reason(tmp_path: Path) -> None:
    answer, logged = scaled(tmp_path, refusal=ConfigError("there are no devices"))
    assert answer["error"]["what"] == "there are no devices" and logged == []
    assert not (tmp_path / "config.yaml").exists()


def test_of_two_commands_the_last_one_counts_and_the_other_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    lock = DirectoryLock(tmp_path)
    with ThreadPoolExecutor(2) as senders:
        first = senders.submit(request_replicas, tmp_path, 2, timeout_s=600.0)
        while (request := pending_request(tmp_path)) is None:
            assert not first.done()
        second = senders.submit(request_replicas, tmp_path, 3, timeout_s=600.0)
        with pytest.raises(RunDirectoryError, match="another command has written its own request"):
            first.result(timeout=600)
        while (request := pending_request(tmp_path)) is None or request["replicas"] != 3:
            assert not second.done()
        answer_request(tmp_path, request, text="3 replicas")
        assert second.result(timeout=600) == "3 replicas"
        with pytest.raises(RunDirectoryError, match="the request is withdrawn"):
            request_replicas(tmp_path, 4, timeout_s=slow(0.3))
    lock.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hwrl.lock", "config.yaml"]


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "[]",
        '{"replica": 2}',
        '{"replicas": 0}',
        '{"replicas": true}',
        '{"id": "1", "replicas": 0}',
        '{"id": "1", "replicas": true}',
        '{"id": 1, "replicas": 2}',
    ],
)
def test_junk_is_removed(tmp_path: Path, junk: str) -> None:
    request_in(tmp_path, junk)
    assert pending_request(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_a_link_is_no_request(tmp_path: Path) -> None:
    (tmp_path / SCALE).symlink_to("/dev/zero")
    assert pending_request(tmp_path) is None


def test_a_request_that_comes_meanwhile_is_not_answered_for_the_one_before(tmp_path: Path) -> None:
    request_in(tmp_path, '{"id": "2", "replicas": 3}')
    answer_request(tmp_path, {"id": "1", "replicas": 2}, text="2 replicas")
    assert pending_request(tmp_path) == {"id": "2", "replicas": 3}


def test_a_request_whose_answer_could_not_be_written_is_not_carried_out_again(tmp_path: Path) -> None:
    path = request_in(tmp_path)
    assert pending_request(tmp_path, carried_out="1") is None and path.exists()
    assert pending_request(tmp_path, carried_out="0") == {"id": "1", "replicas": 2}
