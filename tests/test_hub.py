"""A model by its name on the hub: once per host, pinned, without a network, and with errors that tell what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from tests.support.model_hub import COMMIT, serving

NAME = "tiny/sorter"
SHOW = f"from pathlib import Path; from hwrl.hub import model_directory; print(model_directory(Path('hf:{NAME}')))"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub")
    write_demo(directory, seed=1)
    model = directory / "models" / NAME
    shutil.move(directory / "model", model)
    (model / "modeling.py").write_text("raise SystemExit('code of a model was run')")
    (model / "original").mkdir()
    (model / "original" / "consolidated.safetensors").write_bytes(b"another format")
    return directory


@pytest.fixture
def online(demo: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], Mapping[str, int]]]:
    with serving(demo / "models") as (address, sent):
        yield {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": address}, sent


def hwrl(demo: Path, env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hwrl", arguments[0], str(demo / "config.yaml"), *arguments[1:]]
    return subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=600, cwd=demo)


@pytest.mark.long(60)
def test_a_run_downloads_its_model_once_and_pins_the_commit_and_the_copy_serves_without_a_network(
    demo: Path, tmp_path: Path, online: tuple[dict[str, str], Mapping[str, int]]
) -> None:
    env, sent = online
    run = [f"dir={tmp_path / 'run'}", "goals={}", "eval.every_steps=0", "train.batch_groups=2"]
    run += ["algorithm.loss=distill", f"algorithm.reference={NAME}"]
    first = hwrl(demo, env, "train", f"model.path={NAME}", "train.steps=1", *run)
    assert first.returncode == 0, first.stdout + first.stderr
    assert set(sent.values()) == {1}
    assert "config.json" in sent and "model.safetensors" in sent
    assert not {"modeling.py", "original/consolidated.safetensors"} & set(sent)
    assert (tmp_path / "run" / "config.yaml").read_text().count(f": hf:{NAME}?revision={COMMIT}") == 2
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["actor/reverse_kl"] == pytest.approx(0, abs=1e-5), "before its first step the policy is the teacher"

    alone = {**env, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    shown = subprocess.run([sys.executable, "-c", SHOW], env=alone, capture_output=True, text=True, timeout=600)
    assert Path(shown.stdout.strip()).name == COMMIT, shown.stderr


def test_of_several_processes_of_a_host_one_downloads(online: tuple[dict[str, str], Mapping[str, int]]) -> None:
    env, sent = online
    started = [subprocess.Popen([sys.executable, "-c", SHOW], env=env, stdout=subprocess.PIPE) for _ in range(3)]
    places = {process.communicate(timeout=600)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(places) == 1
    assert set(sent.values()) == {1}


def test_a_plan_needs_no_weights(demo: Path, online: tuple[dict[str, str], Mapping[str, int]]) -> None:
    env, sent = online
    plan = hwrl(demo, env, "plan", f"model.path={NAME}", "--devices", "2", "--memory", "80GiB")
    assert plan.returncode == 0, plan.stderr
    assert "tiny--sorter" in plan.stdout
    assert "model.safetensors" not in sent


@pytest.mark.parametrize(
    ("path", "offline", "expected"),
    [
        (NAME, "1", f"hf download {NAME} "),
        (f"{NAME}?revision=v1", "1", f"hf download {NAME} --revision v1"),
        ("tiny/unknown", "0", "correct the name"),
        ("hf:no-owner", "0", "write OWNER/NAME"),
        ("models/not/there", "0", "or to OWNER/NAME of a model on the hub"),
    ],
)
def test_what_is_not_there_is_told_with_what_to_do(
    demo: Path, online: tuple[dict[str, str], Mapping[str, int]], path: str, offline: str, expected: str
) -> None:
    ended = hwrl(demo, {**online[0], "HF_HUB_OFFLINE": offline}, "train", f"model.path={path}")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
