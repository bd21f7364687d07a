"""The requests of ``hwrl scale`` to a run that does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hwrl.errors import RunDirectoryError
from hwrl.run.scaling import ScaleRequests, request_replicas


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
