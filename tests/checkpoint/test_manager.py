"""The promises of CheckpointManager on one rank: saving, keeping, finding and loading."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hwrl.checkpoint import CheckpointManager, find_checkpoints
from hwrl.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError, ConfigError, MemoryStateError
from hwrl.memory import Offloader
from hwrl_cpu import INFO, CpuBackend
from tests.support.gated import Gated
from tests.support.speed import slow

BACKEND = CpuBackend(INFO)
TRACKER = "latest_checkpointed_iteration.txt"


def manager(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, backend=BACKEND, **options)


def small(value: float) -> dict[str, Any]:
    return {"weight": torch.full((3,), float(value)), "count": int(value)}


def loaded_value(directory: Path) -> float:
    state = small(-1)
    with manager(directory) as opened:
        assert opened.resume(state) is not None
    assert state["weight"].tolist() == [state["count"]] * 3, "a mix of two steps"
    return float(state["count"])


def test_shared_tensors_and_plain_values_come_back(tmp_path: Path) -> None:
    tied = torch.arange(5.0)
    state: dict[str, Any] = {
        "tied": [tied, tied],
        "plain": {"none": None, "text": "x", "pair": (1, 2.5), "nothing": {}},
    }
    other: dict[str, Any] = {
        "tied": [torch.zeros(5), torch.zeros(5)],
        "plain": {"none": 0, "text": 0, "pair": 0, "nothing": {}},
    }
    with manager(tmp_path, async_save=True) as opened:
        opened.save(1, state)
        opened.resume(other)
    assert other["plain"] == state["plain"]
    assert all(torch.equal(one, tied) for one in other["tied"])


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    with manager(tmp_path) as opened:
        opened.save(4, small(4), weight_version=9, export=lambda hf, _: (hf / "a.txt").write_text("hello"))
        (info,) = opened.checkpoints()
    manifest = info.manifest
    assert (manifest.step, manifest.world_size, manifest.weight_version) == (4, 1, 9)
    assert set(manifest.versions) == {"hwrl", "python", "torch"}
    files = {str(path.relative_to(info.path)) for path in info.path.rglob("*") if path.is_file()}
    assert files == {"MANIFEST.json", *manifest.files}
    assert manifest.files["hf/a.txt"].nbytes == 5
    assert info.nbytes == sum((info.path / name).stat().st_size for name in manifest.files)
    assert (tmp_path / TRACKER).read_text() == "4"


def test_torch_makes_one_file_of_it_with_the_states_own_nesting(tmp_path: Path) -> None:
    state = {"model": {"layers.0.weight": torch.ones(2)}, "groups": [{"lr": 0.1}, {"lr": 0.2}]}
    with manager(tmp_path) as opened:
        opened.save(1, state)
    dcp_to_torch_save(tmp_path / "global_step_1", tmp_path / "one_file")
    saved = torch.load(tmp_path / "one_file", weights_only=True)
    assert saved["model"]["layers.0.weight"].tolist() == [1.0, 1.0]
    assert saved["groups"] == state["groups"]


def test_keys_that_are_no_strings_stay_what_they_are(tmp_path: Path) -> None:
    state: dict[str, Any] = {"state": {0: {"step": 5, "exp_avg": torch.ones(2)}, True: [1]}}
    other: dict[str, Any] = {"state": {0: {"step": 0, "exp_avg": torch.zeros(2)}, True: [2]}}
    with manager(tmp_path) as opened:
        opened.save(1, state)
        opened.resume(other)
    assert other["state"][0]["exp_avg"].tolist() == [1.0, 1.0]
    del state["state"][0]["exp_avg"], other["state"][0]["exp_avg"]
    assert other == state


def test_the_newest_are_kept_across_restarts(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        with manager(tmp_path, max_ckpt_to_keep=2) as opened:
            opened.save(step, small(step))
    assert [info.step for info in find_checkpoints(tmp_path)[0]] == [3, 4]
    assert not list(tmp_path.glob(".tmp*")) and not list(tmp_path.glob(".trash*"))


def test_an_empty_directory_has_nothing_to_resume(tmp_path: Path) -> None:
    with manager(tmp_path / "new" / "home") as opened:
        assert opened.resume(small(0)) is None
        assert opened.checkpoints() == []


def test_a_chosen_step_is_loaded_or_refused(tmp_path: Path) -> None:
    state = small(-1)
    with manager(tmp_path) as opened:
        for step in (1, 2):
            opened.save(step, small(step))
        resumed = opened.resume(state, step=1)
        assert resumed is not None and state["count"] == 1
        with pytest.raises(CheckpointNotFoundError, match=r"(?s)step 3.*\[1, 2\]"):
            opened.resume(state, step=3)


@pytest.mark.parametrize("step", [2, 1])
def test_a_step_that_is_not_newer_is_refused(tmp_path: Path, step: int) -> None:
    with manager(tmp_path) as opened:
        opened.save(2, small(2))
        with pytest.raises(CheckpointSaveError, match="already has the complete step 2"):
            opened.save(step, small(9))
        opened.save(3, small(3))
    assert loaded_value(tmp_path) == 3


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"weight": torch.zeros(3)}, "lacks 1 of the checkpoint's names, for example 'count'"),
        ({**small(0), "bias": torch.zeros(1)}, "lacks 1 of the state's names, for example 'bias'"),
        (
            {**small(0), "weight": torch.zeros(4)},
            r"\[3\] in the checkpoint and torch.float32 \[4\] in the state",
        ),
        ({**small(0), "weight": torch.zeros(3).double()}, "float64"),
        ({**small(0), "weight": 3}, "not a tensor in the state"),
    ],
)
def test_another_model_is_refused_and_not_half_loaded(tmp_path: Path, template: dict[str, Any], why: str) -> None:
    with manager(tmp_path) as opened:
        opened.save(1, small(1))
        with pytest.raises(CheckpointError, match=f"(?s)does not fit.*{why}"):
            opened.resume(template)
    assert all(not value.any() for value in template.values() if isinstance(value, torch.Tensor))


class Custom:
    """A value in need of a pickle."""


def test_state_that_only_a_pickle_could_hold_is_refused(tmp_path: Path) -> None:
    with manager(tmp_path) as opened:
        for thing in (Custom(), ({"deep": Custom()}, 1)):
            with pytest.raises(CheckpointSaveError, match=r"'odd.thing'.*(?s:.*)pickle that uses .*_manager\.Custom"):
                opened.save(1, {"odd": {"thing": thing}})
        assert [path.name for path in tmp_path.iterdir()] == [".hwrl.lock"]


@pytest.mark.parametrize("extra", [{"a": {3: "x"}}, {"a": object()}, {"a": [{None: 1}]}, {"a": [(1, 2)]}])
def test_extra_that_json_would_alter_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    with manager(tmp_path) as opened, pytest.raises(CheckpointSaveError, match="extra state"):
        opened.save(1, small(1), extra=extra)


def test_offloaded_state_is_refused_instead_of_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    state = {"model": model.state_dict()}
    with manager(tmp_path) as opened, Offloader(model, backend=BACKEND) as offloader:
        offloader.offload()
        with offloader.lending(), pytest.raises(MemoryStateError, match="has no storage"):
            opened.save(1, state)
        with offloader.loaded():
            opened.save(1, state)
        with pytest.raises(MemoryStateError, match="has no storage"):
            opened.resume(state)


def _export_badly(directory: Path, _: object) -> None:
    (directory / "inner").mkdir()
    (directory / "inner" / "link").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("export", "why"), [(_export_badly, "symbolic link: link"), (lambda hf, _: 1 / 0, "ZeroDivis")]
)
def test_an_export_that_fails_leaves_the_directory_as_it_was(tmp_path: Path, export: Any, why: str) -> None:
    with manager(tmp_path) as opened:
        with pytest.raises(CheckpointSaveError, match=why):
            opened.save(1, small(1), export=export)
        assert [path.name for path in tmp_path.iterdir()] == [".hwrl.lock"]
        opened.save(1, small(1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_ckpt_to_keep": 0}, "max_ckpt_to_keep=0"),
        ({"staging": "device"}, "not allowed without async_save"),
        ({"staging": "moon", "async_save": True}, 'give "host" or "device"'),
    ],
)
def test_an_impossible_option_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        manager(tmp_path, **options)


def test_opening_removes_what_hwrl_left_and_nothing_of_anybody_else(tmp_path: Path) -> None:
    ours = [f".tmp_global_step_4.{'0a' * 8}", f".tmp_mark_{'0b' * 8}", f".trash_global_step_3.{'0c' * 4}"]
    others = [
        ".tmp_mine",
        ".trash_notes",
        ".tmp_global_step_4",
        ".tmp_global_step_4.mine",
        ".trash_global_step_x.00000000",
    ]
    for name in [*ours, *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    (tmp_path / f".tmp_{TRACKER}").touch()
    manager(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".hwrl.lock"}
    assert all((tmp_path / name / "precious").exists() for name in others)


def test_an_unusable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot keep checkpoints"):
        manager(tmp_path / "file" / "home")


# -- in the background ------------------------------------------------------------------------------------------


def test_a_save_waits_for_the_one_before_and_says_how_long(tmp_path: Path) -> None:
    fs = Gated()
    with manager(tmp_path, async_save=True, fs=fs) as opened:
        first = opened.save(1, small(1))
        assert fs.arrived.wait(300)
        threading.Timer(slow(0.2), fs.gate.set).start()
        second = opened.save(2, small(2))
        assert first.waited_s < second.waited_s
    assert loaded_value(tmp_path) == 2


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_failed_background_save_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    fs = Gated()
    fs.gate.set()
    opened = manager(tmp_path, async_save=True, fs=fs)
    opened.save(1, small(1))
    opened.wait()
    fs.error = OSError(28, "No space left on device", "somewhere")
    opened.save(2, small(2))
    with pytest.raises(CheckpointSaveError, match=r"(?s)step 2 was not saved.*No space left"):
        opened.save(3, small(3)) if call == "save" else getattr(opened, call)()
    fs.error = None
    if call != "close":
        opened.save(4, small(4))
    opened.close()
    assert loaded_value(tmp_path) == (1 if call == "close" else 4)


def test_an_error_in_the_block_is_not_hidden_by_a_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fs = Gated()
    fs.gate.set()
    fs.error = OSError(28, "No space left on device", "somewhere")
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ZeroDivisionError),
        manager(tmp_path, async_save=True, fs=fs) as opened,
    ):
        opened.save(1, small(1))
        raise ZeroDivisionError
    assert "step 1 was not saved" in caplog.text
