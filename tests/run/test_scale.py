"""Replicas join and leave a real run while it goes on: ``hwrl scale``."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml

from hwrl.checkpoint import DirectoryLock
from hwrl.cli import main
from hwrl.errors import ConfigError
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import DeviceCounts
from hwrl.run.report import read_lines
from hwrl.run.report.views import EVENTS
from hwrl.run.scaling import answer_request, pending_request
from tests.support.numbered import INFO, NumberedBackend
from tests.support.run_config import config_of
from tests.support.train_run import HWRL, Run, trained_prompts


def scale(directory: Path, replicas: int) -> str:
    command = [HWRL, "scale", str(directory), "--replicas", str(replicas)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def replicas_in_config(run: Run) -> int:
    return int(yaml.safe_load((run.directory / "config.yaml").read_text())["rollout"]["replicas"])


@pytest.mark.long(40)
def test_replicas_join_and_leave_while_the_run_goes_on(start: Callable[..., Run]) -> None:
    run = start("train.steps=100000", "eval.every_steps=0", "checkpoint.save_every_steps=0", "optimizer.warmup_steps=0")
    run.wait_for_step(5)
    assert "1 → 2 replicas: replica-1 will join" in scale(run.directory, 2)
    assert replicas_in_config(run) == 2
    run.wait_for_output("rollout replica-1 joined")
    run.wait_until(lambda: run.last_metrics().get("sync/receivers") == 2.0, 600.0, "version for both")
    run.wait_for_step(int(run.metrics()[-1]["step"]) + 10)
    assert "replica-1 will leave" in scale(run.directory, 1)
    assert replicas_in_config(run) == 1
    run.wait_for_output("rollout replica-1 left")
    run.wait_until(lambda: run.last_metrics().get("sync/receivers") == 1.0, 600.0, "version for one")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output()
    lines = run.metrics()
    running = [line["rollout/replicas"] for line in lines]
    assert running[0] == running[-1] == 1.0 and 2.0 in running
    assert max(line["sync/receivers"] for line in lines) == 2.0 and lines[-1]["sync/receivers"] == 1.0
    assert max(line["staleness/max"] for line in lines) <= 2.0
    assert_all_trained_once(run)
    assert_no_step_waited(lines)
    kinds = [event["kind"] for _, event in read_lines(run.directory / EVENTS) if event is not None]
    assert kinds.count("scale") == 4 and "replica" not in kinds


def assert_all_trained_once(run: Run) -> None:
    """No number twice. A lost one would hold the trainer: only the last few may be missing, with the run's end."""
    trained = trained_prompts(run)
    assert len(set(trained)) == len(trained)
    missing = set(range(max(trained))) - set(trained)
    assert not missing or min(missing) > max(trained) - 32


def assert_no_step_waited(lines: list[dict[str, float]]) -> None:
    """The version that the new replica got first took no longer to send than others did, not as long as its start."""
    first = next(number for number, line in enumerate(lines) if line["sync/receivers"] == 2.0)
    others_s = [line["timing_s/sync"] for number, line in enumerate(lines) if number != first]
    assert lines[first]["timing_s/sync"] < max(3.0, 2 * max(others_s))


def test_a_run_that_cannot_be_scaled_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scale", str(tmp_path), "--replicas", "2", "--timeout-s", "0.3"]
    assert main(words) == 1
    assert f"there is no run in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main(words) == 1
    assert "is not running" in capsys.readouterr().err
    lock = DirectoryLock(tmp_path)
    assert main(words) == 1
    assert "has not answered" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hwrl.lock", "config.yaml"], "it is withdrawn"
    lock.close()


def test_a_refusal_reaches_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    lock, ended = DirectoryLock(tmp_path), Event()
    refusal = ConfigError("there are no devices", why="2 are free", fix="ask for 2")

    def refuse() -> None:
        while not ended.wait(0.05):
            if (request := pending_request(tmp_path)) is not None:
                answer_request(tmp_path, request, error=refusal)

    thread = Thread(target=refuse)
    thread.start()
    try:
        assert main(["scale", str(tmp_path), "--replicas", "7"]) == 1
    finally:
        ended.set()
        thread.join()
        lock.close()
    told = capsys.readouterr().err
    assert all(text in told for text in ("the run refused: there are no devices", "2 are free", "ask for 2"))


def test_a_replica_joins_on_free_devices_and_gets_its_first_ones_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBERED_DEVICES", "4")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    devices = RunDevices(config_of(tmp_path, rollout={"replicas": 2}), NumberedBackend(INFO))
    devices.remove_replica("replica-1")
    assert devices.counts == DeviceCounts(1, 2)
    devices.add_replica("replica-2")
    devices.add_replica("replica-1")
    assert [devices.devices_of(f"replica-{index}").indices for index in range(3)] == [(1,), (2,), (3,)]
    assert devices.ray_options("replica-2")["resources"] == {"NUMBERED": 1.0} and devices.counts == DeviceCounts(3, 4)
    with pytest.raises(ConfigError, match=r"not enough devices for replica-3[\s\S]*0 of this machine's 4 are free"):
        devices.add_replica("replica-3")
    devices.remove_replica("replica-2")
    devices.add_replica("replica-3")
    assert devices.devices_of("replica-3").indices == (3,)
