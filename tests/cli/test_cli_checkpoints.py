"""``hwrl checkpoints``: its output, finds, writes and removals, with and without a trainer beside it."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hwrl.checkpoint import CheckpointManager, find_checkpoints
from hwrl.checkpoint.lock import LOCK_NAME, DirectoryLock
from hwrl.checkpoint.manifest import hold_for_reading
from hwrl.cli import main
from hwrl.models import build_model, load_model
from hwrl.run.demo import write_demo
from hwrl_cpu import INFO, CpuBackend

TRACKER = "latest_checkpointed_iteration.txt"


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
    draft = f".tmp_global_step_4.{'0a' * 8}"
    (home / draft).mkdir()
    (home / ".broken_global_step_4.y").mkdir()
    listed = _run(capsys, "ls", home)
    assert [(one["step"], one["weight_version"]) for one in listed["checkpoints"]] == [(1, 1), (3, 3)]
    assert listed["incomplete"] == [{"path": str(home / "global_step_2"), "reason": "layout.json is missing"}]
    assert [Path(path).name for path in listed["unfinished"]] == [draft]
    assert [Path(path).name for path in listed["set_aside"]] == [".broken_global_step_4.y"]
    assert (listed["tracker"], listed["owner"]) == ("3", None)
    with _manager(home):
        assert f"process {os.getpid()} on" in _run(capsys, "ls", home)["owner"]
    assert main(["checkpoints", "ls", str(home)]) == 0
    text = capsys.readouterr().out
    assert "step 3" in text and "global_step_2 is not complete: layout.json is missing" in text
    (home / TRACKER).write_bytes(b"\xff3")
    assert _run(capsys, "ls", home)["tracker"] == "\ufffd3"


def test_ls_has_the_account_of_the_prompts_in_a_runs_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = {"version": 3, "trained": 6, "next": 12, "owed": [9, 11], "filtered": [[2, 4]], "failed": [[7, 7]]}
    with _manager(tmp_path) as manager:
        for step, state in ((1, {"version": 0, "trained": 4, "next": 5, "owed": [4]}), (2, ledger)):
            manager.save(step, {"model": {"weight": torch.ones(3)}}, extra={"ledger": state})
        manager.save(3, {"model": {"weight": torch.ones(3)}}, extra={"ledger": "of another program"})
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    _, first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("; prompts: 4 trained, 0 filtered, 0 failed, 1 owed"), "of an earlier hwrl"
    assert second.endswith("; prompts: 6 trained, 3 filtered, 1 failed, 2 owed")
    assert "prompts" not in third
    assert [one["prompts"] for one in _run(capsys, "ls", tmp_path)["checkpoints"]][1:] == [ledger, None]


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
        told = capsys.readouterr().err
        assert f"process {os.getpid()} on" in told and "checkpoint.max_ckpt_to_keep" in told
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


ACTIONS = [
    ["ls"],
    ["verify"],
    ["prune", "--keep", "1"],
    ["export", "--model", "m", "OUT"],
    ["join", "--out", "OUT", "HOME"],
]


@pytest.mark.parametrize("words", ACTIONS)
def test_a_wrong_directory_is_no_success_and_nothing_in_it_is_touched(
    home: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, places = tmp_path / "wrong", {"HOME": str(home), "OUT": str(tmp_path / "out")}
    for name in (".tmp_cache", ".trash_notes", "model"):
        (wrong / name).mkdir(parents=True)
    (wrong / LOCK_NAME).touch()  # of a run that ended before its first save
    command, *rest = words
    assert main(["checkpoints", command, str(wrong), *(places.get(word, word) for word in rest)]) == 1
    assert f"{wrong} holds no checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in wrong.iterdir()) == [LOCK_NAME, ".tmp_cache", ".trash_notes", "model"]
    assert not (tmp_path / "out").exists()


def test_the_directory_of_a_run_stands_for_the_checkpoints_in_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.parent / ".hwrl.lock").touch()
    listed = _run(capsys, "ls", home.parent)
    assert listed["directory"] == str(home) and len(listed["checkpoints"]) == 3
    assert _run(capsys, "prune", home.parent, "--keep", 1)["removed"] == [1, 2]


@pytest.mark.parametrize("at", ["", "checkpoints"], ids=["of a run that begins", "of its trainer"])
def test_before_the_first_save_ls_shows_who_writes_and_the_others_tell_it(
    tmp_path: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / at).mkdir(exist_ok=True)
    lock = DirectoryLock(tmp_path / at)
    listed = _run(capsys, "ls", tmp_path)
    assert (listed["status"], listed["tracker"], listed["checkpoints"]) == (0, None, [])
    assert f"process {os.getpid()} on" in listed["owner"]
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "there is no tracker yet" in told and "nothing was saved yet" in told
    assert main(["checkpoints", "verify", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "why: nothing was saved there; " in told and f"process {os.getpid()} on" in told
    assert "fix: wait for its next save" in told
    lock.close()


def test_where_a_save_did_not_end_verify_says_that_nothing_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f".tmp_global_step_4.{'0a' * 8}").mkdir()
    assert main(["checkpoints", "verify", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no checkpoint\n  why: nothing was saved there\n  fix: " in capsys.readouterr().err


def test_a_join_replaces_nothing(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later, same, earlier = tmp_path / "later", tmp_path / "same", tmp_path / "earlier"
    for directory, step in ((later, 9), (same, 3), (earlier, 2)):
        with _manager(directory) as manager:
            manager.save(step, {"model": {"weight": torch.zeros(1)}})
    found = {directory: find_checkpoints(directory)[0] for directory in (home, later, same, earlier)}
    (home.parent / "link").symlink_to(home)
    for out, why in (
        (home.parent / "link", "is one of the directories"),
        (later, "already has step 9"),
        (same, "already has step 3"),
    ):
        assert main(["checkpoints", "join", str(home), str(home), "--out", str(out)]) == 1
        assert why in capsys.readouterr().err
    (earlier / TRACKER).write_text("8")
    assert _run(capsys, "join", home, home, "--out", earlier)["step"] == 3
    assert (earlier / TRACKER).read_text() == "8", "it never goes back"
    found[earlier].append(find_checkpoints(earlier)[0][-1])
    assert {directory: find_checkpoints(directory)[0] for directory in found} == found
    assert [(directory / TRACKER).read_text() for directory in (home, later, same)] == ["3", "9", "3"]


def test_what_is_damaged_while_it_is_copied_is_not_joined(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _flip(home / "global_step_3" / "__0_0.distcp")
    assert main(["checkpoints", "join", str(home), str(home), "--out", str(tmp_path / "out")]) == 1
    assert "__0_0.distcp does not match its hash" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".hwrl.lock"]


def test_what_somebody_reads_is_kept_until_the_next_save(home: Path) -> None:
    oldest = find_checkpoints(home)[0][0]
    with _manager(home, max_ckpt_to_keep=1) as manager:
        with hold_for_reading(oldest):
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


def test_an_export_rotates_and_talks_as_the_run_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_demo(tmp_path, seed=1, prompts=20)
    source, home, out = tmp_path / "model", tmp_path / "checkpoints", tmp_path / "out"
    path = source / "config.json"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "max_position_embeddings": 16, "quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    of_run = {"max_length": 40, "chat_template": "{{ messages[0]['content'] }}"}
    with _manager(home) as manager:
        model = build_model(source, dtype=torch.float32, max_length=40)
        manager.save(1, {"model": model.state_dict()}, extra={"export": of_run})
        assert _run(capsys, "export", home, out, "--model", source)["step"] == 1
    config = AutoConfig.from_pretrained(out)
    assert not hasattr(config, "quantization_config")
    assert (config.rope_parameters, config.max_position_embeddings) == (model.config.rope_parameters, 40)
    assert config.rope_parameters["rope_theta"] > 1e4
    talk = [{"role": "user", "content": "7"}]
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(talk, tokenize=False) == "7"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls", "nowhere"], "there is no such directory"),
        (["join", "HOME", "nowhere", "--out", "OUT"], "there is no such directory"),
        (["verify", "HOME", "--step", "9"], r"no checkpoint of step 9"),
        (["prune", "HOME", "--keep", "0"], "--keep 0 is not possible"),
        (["export", "HOME", "HOME", "--model", "m"], "exists"),
        (["export", "HOME", "/proc/none/out", "--model", "MODEL"], "/proc/none/out cannot be written\n  why: "),
        (["export", "HOME", "OUT", "--model", "nowhere"], "there is no directory nowhere\n  why: --model names it"),
        (["export", "HOME", "OUT", "--model", "MODEL"], "the checkpoint's model is not the one in"),
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


@pytest.mark.parametrize("dtype", ["load", "int8"])
def test_a_dtype_that_is_none_of_a_models_is_wrong_usage(
    home: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoints", "export", str(home), "out", "--model", "unread", "--dtype", dtype])
    assert f"invalid choice: '{dtype}' (choose from 'float32', 'bfloat16'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("extra.json", "[]", "extra.json cannot be read"),
        (
            "extra.json",
            '{"all": {"export": {"max_length": "x"}}, "ranks": [{}]}',
            "settings of an export that are none",
        ),
        ("extra.json", '{"all": {"adapter": 5}, "ranks": [{}]}', "extra.json has an adapter that is none of hwrl's"),
        ("layout.json", None, "'model.weight' needs more than its"),
    ],
)
def test_what_was_forged_is_not_exported(
    home: Path, name: str, content: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = home / "global_step_3"
    if content is None:
        (entry,) = json.loads((step / name).read_text())
        content = json.dumps([{**entry, "shape": [10**12], "sizes": [10**12]}])
    (step / name).write_text(content)
    body = json.loads((step / "MANIFEST.json").read_text())
    del body["manifest_sha256"]
    body["files"][name] = {"nbytes": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    body["manifest_sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (step / "MANIFEST.json").write_text(json.dumps(body))
    assert main(["checkpoints", "export", str(home), str(tmp_path / "out"), "--model", str(tmp_path)]) == 1
    assert text in capsys.readouterr().err
