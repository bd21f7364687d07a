"""``hwrl checkpoints``: what it shows, finds, writes and removes, with and without a trainer beside it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwrl.checkpoint import CheckpointManager, find_checkpoints
from hwrl.checkpoint.manifest import in_use
from hwrl.cli import main
from hwrl.models import load_model
from hwrl.run.demo import write_demo
from hwrl_cpu import INFO, CpuBackend


def _manager(home: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(home, backend=CpuBackend(INFO), **options)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with _manager(tmp_path / "checkpoints") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": {"weight": torch.full((9,), float(step))}}, weight_version=step)
    return tmp_path / "checkpoints"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    status = main(["checkpoints", *map(str, words), "--json"])
    return {"status": status, **json.loads(capsys.readouterr().out)}


def test_ls_shows_what_is_complete_what_is_not_and_who_writes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "global_step_2" / "layout.json").unlink()
    (home / ".tmp_global_step_4.x").mkdir()
    (home / ".broken_global_step_4.y").mkdir()
    listed = _run(capsys, "ls", home)
    assert [(one["step"], one["weight_version"]) for one in listed["checkpoints"]] == [(1, 1), (3, 3)]
    assert listed["incomplete"] == [{"path": str(home / "global_step_2"), "reason": "layout.json is missing"}]
    assert [Path(path).name for path in listed["unfinished"]] == [".tmp_global_step_4.x"]
    assert [Path(path).name for path in listed["set_aside"]] == [".broken_global_step_4.y"]
    assert (listed["tracker"], listed["owner"]) == ("3", None)
    with _manager(home):
        assert f"process {os.getpid()} on" in _run(capsys, "ls", home)["owner"]
    assert main(["checkpoints", "ls", str(home)]) == 0
    text = capsys.readouterr().out
    assert "step 3" in text and "global_step_2 is not complete: layout.json is missing" in text


def test_verify_names_what_differs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, "verify", home) == {"status": 0, "directory": str(home), "whole": [1, 2, 3], "broken": {}}
    _flip(home / "global_step_2" / "__0_0.distcp")
    found = _run(capsys, "verify", home)
    assert (found["status"], found["whole"]) == (1, [1, 3])
    assert "__0_0.distcp does not match" in found["broken"]["global_step_2"]
    assert _run(capsys, "verify", home, "--step", 3)["status"] == 0


def test_prune_keeps_the_newest_and_waits_for_no_trainer(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _manager(home):
        assert main(["checkpoints", "prune", str(home), "--keep", "1"]) == 1
        assert f"process {os.getpid()} on" in capsys.readouterr().err
    assert [info.step for info in find_checkpoints(home)[0]] == [1, 2, 3]
    pruned = _run(capsys, "prune", home, "--keep", 2)
    assert (pruned["removed"], pruned["kept"]) == ([1], [2, 3])
    assert pruned["freed_nbytes"] > 0
    assert [info.step for info in find_checkpoints(home)[0]] == [2, 3]


def test_prune_removes_nothing_for_the_sake_of_what_is_damaged(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _flip(home / "global_step_3" / "__0_0.distcp")
    assert main(["checkpoints", "prune", str(home), "--keep", "1"]) == 1
    assert "does not match its hash" in capsys.readouterr().err
    assert [info.step for info in find_checkpoints(home)[0]] == [1, 2, 3]


def test_verify_of_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(tmp_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().out


def test_what_somebody_reads_is_kept_until_the_next_save(home: Path) -> None:
    oldest = find_checkpoints(home)[0][0]
    with _manager(home, max_ckpt_to_keep=1) as manager:
        with in_use(oldest):
            manager.save(4, {"weight": torch.ones(1)})
            assert [info.step for info in manager.checkpoints()] == [1, 4]
        manager.save(5, {"weight": torch.ones(1)})
        assert [info.step for info in manager.checkpoints()] == [5]


def test_export_is_loaded_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_demo(tmp_path, seed=1, prompts=20)
    source, home, out = tmp_path / "model", tmp_path / "checkpoints", tmp_path / "out"
    model = load_model(source, dtype=torch.float32)
    with _manager(home) as manager:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(step)
            manager.save(step, {"model": model.state_dict()})
        assert _run(capsys, "export", home, out, "--model", source)["step"] == 2
    assert list(out.glob("*.safetensors"))
    exported = AutoModelForCausalLM.from_pretrained(out)
    for name, value in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value), name
    assert AutoTokenizer.from_pretrained(out)("1 + 1") == AutoTokenizer.from_pretrained(source)("1 + 1")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls", "nowhere"], "there is no directory nowhere"),
        (["verify", "HOME", "--step", "9"], r"no checkpoint of step 9"),
        (["prune", "HOME", "--keep", "0"], "--keep 0 is not possible"),
        (["export", "HOME", "HOME", "--model", "m"], "exists"),
        (["export", "HOME", "OUT", "--model", "nowhere"], "nowhere"),
        (["export", "HOME", "OUT", "--model", "MODEL"], "the checkpoint's model is not the one in"),
        (["export", "HOME", "OUT", "--model", "MODEL", "--dtype", "load"], "--dtype load is no dtype"),
    ],
)
def test_errors_say_what_is_wrong(
    home: Path, words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "MODEL" in words:
        write_demo(tmp_path, seed=1, prompts=20)
    places = {"HOME": str(home), "OUT": str(tmp_path / "out"), "MODEL": str(tmp_path / "model")}
    assert main(["checkpoints", *(places.get(word, word) for word in words)]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
