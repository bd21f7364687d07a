"""The trackers with their real libraries, offline: a run, and its continuation after a resume."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from hwrl.errors import ConfigError, EngineError
from hwrl.interfaces import TrackedRun, Tracker

RUN_ID = "0123456789abcdef0123456789abcdef"
CONFIG = {"seed": 3, "train": {"steps": 4}, "report": {"trackers": ["wandb"]}, "goals": {"eval/pass@4": 0.9}}

pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries warn about others


def tracker(name: str, **options: Any) -> Tracker:
    made = importlib.import_module(f"hwrl_trackers.{name}").hwrl_tracker(options=options)
    assert isinstance(made, Tracker)
    return made


def track_twice(directory: Path, name: str, **options: Any) -> None:
    """Track steps 1 to 3, then resume at step 2 and track steps 3 and 4."""
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        life = tracker(name, **options)
        life.start(TrackedRun(RUN_ID, "sorting", directory, CONFIG, resume_step))
        for step in steps:
            life.log({"reward/mean": step / 10 + resume_step, "eval/pass@4": 0.5}, step=step)
        life.finish("interrupted" if resume_step == 0 else "finished")


def test_mlflow_continues_its_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    track_twice(tmp_path, "mlflow", tracking_uri=store)
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("hwrl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "sorting")
    assert run.data.params["train.steps"] == "4"
    assert run.data.params["goals.eval/pass_4"] == "0.9", "MLflow refuses @ in a name"
    assert run.data.metrics["eval/pass_4"] == 0.5
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in points) == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 2.3), (4, 2.4)]


def test_wandb_keeps_the_id_of_the_run_and_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    track_twice(tmp_path, "wandb", mode="offline")
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb"))
    assert files
    content = b"".join(file.read_bytes() for file in files)
    assert content.count(b"reward/mean") >= 5 and b"sorting" in content


def test_trackio_continues_its_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    storage = importlib.import_module("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    track_twice(tmp_path, "trackio", project="sorting")
    (name,) = storage.SQLiteStorage.get_runs("sorting")
    assert name == f"sorting-{RUN_ID[:8]}"
    rows = storage.SQLiteStorage.get_logs("sorting", name)
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 2.3), (4, 2.4)]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_library_that_is_not_installed_is_an_error_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=f"{name} is not installed"):
        tracker(name)


@pytest.mark.parametrize(("name", "option"), [("wandb", "projct"), ("trackio", "projct"), ("mlflow", "experimnt")])
def test_an_unknown_option_is_an_error_before_the_run(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "found")
    with pytest.raises(ConfigError, match="did you mean"):
        tracker(name, **{option: "x"})
