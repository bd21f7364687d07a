"""A damaged or forged checkpoint is recognised, named, and skipped; nothing in it is executed."""

import copy
import ctypes
import hashlib
import io
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from hwrl.checkpoint import CheckpointManager, DurableFS, find_checkpoints
from hwrl.checkpoint.export import copy_for_torch
from hwrl.checkpoint.layout import are_disjoint
from hwrl.checkpoint.manifest import hold_for_reading, verify_files
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)
_NUMBER = st.integers(0, 4)


def _saved(directory: Path) -> None:
    with CheckpointManager(directory, backend=BACKEND) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((64,), float(step)), "count": step}, extra={"step": step})


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest like a forger: with a correct hash."""
    body = json.loads((directory / "MANIFEST.json").read_text())
    del body["manifest_sha256"]
    change(body)
    body["manifest_sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (directory / "MANIFEST.json").write_text(json.dumps(body))


def _move_and_link(path: Path, *, home: Path) -> None:
    path.rename(home / "outside")
    path.symlink_to(home / "outside")


def _add_file(step: Path, name: str, content: bytes) -> None:
    record = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _forge(step, lambda body: body["files"].update({name: record}))


def _flip_manifest(step: Path) -> None:
    text = (step / "MANIFEST.json").read_text()
    (step / "MANIFEST.json").write_text(text.replace('"weight_version": 0', '"weight_version": 1'))


def _leave(step: Path) -> None:
    (step.parent / "outside").write_bytes(b"secret")
    _add_file(step, "../outside", b"secret")


def _pipe_for_file(step: Path) -> None:
    (step / "extra.json").unlink()
    os.mkfifo(step / "extra.json")


def _file_for_directory(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("")


def _unnamed_extra(step: Path) -> None:
    _move_and_link(step / "extra.json", home=step.parent)
    _forge(step, lambda body: body["files"].pop("extra.json"))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda step: os.truncate(step / "__0_0.distcp", 100), "has 100 bytes and the manifest says"),
    (lambda step: _flip(step / "__0_0.distcp", -200), "content of __0_0.distcp does not match"),
    (lambda step: _flip(step / "extra.json", 10), "content of extra.json does not match"),
    (_flip_manifest, "its manifest does not match the hash in it"),
    (lambda step: (step / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
    (lambda step: (step / "MANIFEST.json").write_bytes(b""), "MANIFEST.json cannot be read"),
    (lambda step: (step / "MANIFEST.json").write_text("[1]"), "MANIFEST.json cannot be read"),
    (lambda step: (step / "MANIFEST.json").write_text("[" * 1_000_000), "MANIFEST.json cannot be read"),
    (lambda step: (step / "MANIFEST.json").write_bytes(b"\xff\xfe{}"), "MANIFEST.json cannot be read"),
    (lambda step: os.truncate(step / "MANIFEST.json", 1 << 40), "it has more than"),
    (lambda step: (step / "layout.json").unlink(), "layout.json is missing"),
    (lambda step: _move_and_link(step / "__0_0.distcp", home=step.parent), "__0_0.distcp is a symbolic link"),
    (lambda step: _move_and_link(step, home=step.parent), "it is a symbolic link"),
    (_leave, "'../outside', which is not a path inside it"),
    (lambda step: _add_file(step, "/etc/hostname", b"x"), "'/etc/hostname', which is not a path inside it"),
    (lambda step: _add_file(step, "a\0b", b"x"), "null"),
    (lambda step: _forge(step, lambda body: body.update(step=7)), "its manifest is for step 7"),
    (lambda step: _forge(step, lambda body: body.update(schema=99)), "the schema of its manifest is not 2"),
    (lambda step: _forge(step, lambda body: body.update(surprise=1)), "MANIFEST.json cannot be read"),
    (lambda step: _forge(step, lambda body: body.update(weight_version="7")), "MANIFEST.json cannot be read"),
    (lambda step: _forge(step, lambda body: body.update(saved_unix_s=1e300)), "MANIFEST.json cannot be read"),
    (_pipe_for_file, "extra.json is a symbolic link or not a regular file"),
    (_file_for_directory, "Not a directory"),
    (_unnamed_extra, "its manifest does not list extra.json"),
    (lambda step: _forge(step, lambda body: body["files"].clear()), "its manifest does not list layout.json"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    _saved(tmp_path)
    damage(tmp_path / "global_step_2")
    state = {"weight": torch.zeros(64), "count": 0}
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        resumed = manager.resume(state)
        assert resumed is not None and (resumed.step, state["count"], resumed.extra) == (1, 1, {"step": 1})
        assert [one.path.name for one in resumed.skipped] == ["global_step_2"]
        assert reason in resumed.skipped[0].reason
        with pytest.raises(CheckpointCorruptError, match=re.escape(reason)):
            manager.resume(state, step=2)
        if (outside := tmp_path / "outside").is_dir():
            shutil.rmtree(outside)
        damage(tmp_path / "global_step_1")
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
            manager.resume(state)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _plant(step: Path, name: str, payload: bytes) -> None:
    """Overwrite a file and make the manifest agree."""
    (step / name).write_bytes(payload)
    _add_file(step, name, payload)


def test_no_pickle_in_torchs_metadata_is_executed(tmp_path: Path) -> None:
    _saved(tmp_path)
    bomb, state = tmp_path / "exploded", {"weight": torch.zeros(64), "count": 0}
    _plant(tmp_path / "global_step_2", ".metadata", pickle.dumps(_Bomb(bomb)))
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        assert manager.resume(state) is not None
    assert state["count"] == 2 and not bomb.exists()


def _point_to(step: Path, name: str, payload: bytes) -> None:
    """Append ``payload`` to the data, and point the layout's entry ``name`` to it."""
    good = (step / "__0_0.distcp").read_bytes()
    entries = json.loads((step / "layout.json").read_text())
    for entry in entries:
        if entry["name"] == name:
            entry.update(start=len(good), nbytes=len(payload))
    _plant(step, "__0_0.distcp", good + payload)
    _plant(step, "layout.json", json.dumps(entries).encode())


def _archive(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _packed(payload: bytes) -> bytes:
    """Return torch's archive with compressed records. torch reads this as well."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as plain, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for record in plain.namelist():
            packed.writestr(record, plain.read(record))
    assert torch.load(io.BytesIO(target.getvalue()), weights_only=True) is not None
    return target.getvalue()


def _overlapping(payload: bytes) -> bytes:
    """Return an archive with its largest record twice in its directory."""
    target = io.BytesIO(payload)
    with zipfile.ZipFile(target, "a") as archive:
        twin = copy.copy(max(archive.infolist(), key=lambda record: record.file_size))
        twin.filename = twin.filename + "b"
        archive.filelist.append(twin)
        archive._didModify = True  # type: ignore[attr-defined] # has the directory written again
    return target.getvalue()


@pytest.mark.parametrize(("name", "forge"), [("weight", _packed), ("count", _packed), ("count", _overlapping)])
def test_data_that_would_unpack_to_more_than_its_size_is_refused(
    tmp_path: Path, name: str, forge: Callable[[bytes], bytes]
) -> None:
    _saved(tmp_path)
    (tmp_path / "copy").mkdir()
    _point_to(tmp_path / "global_step_2", name, forge(_archive(torch.zeros(1 << 20))))
    with (
        CheckpointManager(tmp_path, backend=BACKEND) as manager,
        pytest.raises(CheckpointCorruptError, match=r"bytes in it would unpack to [48],"),
    ):
        manager.resume({"weight": torch.zeros(64), "count": 0})
    info = find_checkpoints(tmp_path)[0][1]
    if name == "weight":
        return  # torch's tools get it as it is
    with pytest.raises(CheckpointCorruptError, match="would unpack to"):
        copy_for_torch(info, tmp_path / "copy", aside=name, fs=DurableFS())


@pytest.mark.parametrize("name", ["weight", "count"])
def test_no_pickle_in_the_data_is_executed(tmp_path: Path, name: str) -> None:
    _saved(tmp_path)
    bomb = tmp_path / "exploded"
    _point_to(tmp_path / "global_step_2", name, _archive(_Bomb(bomb)))
    with (
        CheckpointManager(tmp_path, backend=BACKEND) as manager,
        pytest.raises(CheckpointCorruptError, match="global_step_2"),
    ):
        manager.resume({"weight": torch.zeros(64), "count": 0})
    assert not bomb.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"file": "../outside"}, "names '../outside'"),
        ({"start": -1}, "lie outside"),
        ({"nbytes": 1 << 40}, "lie outside"),
        ({"dtype": "load"}, "is not a dtype"),
        ({"kind": "ODD"}, "cannot be read"),
        ({"offsets": "x"}, "cannot be read"),
        ({"name": 5}, "5 is not a name"),
        ({"sizes": [63]}, "'weight' overlap or do not cover the tensor"),
        ({"sizes": [65]}, "'weight' overlap or do not cover the tensor"),
        ({"offsets": [-1]}, "'weight' overlap or do not cover the tensor"),
        ({"offsets": [0, 0]}, "cannot be read"),
        ({"shape": [10**12], "sizes": [10**12]}, "'weight' needs more than its"),
        ({"shape": [10**30], "sizes": [10**30]}, "cannot be read"),
    ],
)
def test_a_layout_that_lies_is_recognised(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    _saved(tmp_path)
    step = tmp_path / "global_step_2"
    entries = json.loads((step / "layout.json").read_text())
    for entry in entries:
        entry.update({key: value for key, value in change.items() if key in entry})
    _plant(step, "layout.json", json.dumps(entries).encode())
    with (
        CheckpointManager(tmp_path, backend=BACKEND) as manager,
        pytest.raises(CheckpointCorruptError, match=reason),
    ):
        manager.resume({"weight": torch.zeros(64), "count": 0})


@pytest.mark.parametrize(
    "text",
    ["[" * 1_000_000, '{"all": 3, "ranks": [{}]}', '{"all": {}, "ranks": []}', '{"all": {}, "ranks": [7]}', "\xff"],
)
def test_extra_state_that_lies_is_recognised(tmp_path: Path, text: str) -> None:
    _saved(tmp_path)
    _plant(tmp_path / "global_step_2", "extra.json", text.encode("latin-1"))
    with (
        CheckpointManager(tmp_path, backend=BACKEND) as manager,
        pytest.raises(CheckpointCorruptError, match=r"extra\.json"),
    ):
        manager.resume({"weight": torch.zeros(64), "count": 0})


@pytest.mark.parametrize("doubled", [True, False])
def test_a_layout_with_parts_missing_or_twice_loads_nothing(tmp_path: Path, doubled: bool) -> None:
    """Two halves of a tensor; a forger leaves one out, or gives it instead of the other."""
    _saved(tmp_path)
    step = tmp_path / "global_step_2"
    entries = json.loads((step / "layout.json").read_text())
    weight = next(entry for entry in entries if entry["name"] == "weight")
    weight["sizes"] = [32]
    entries += [{**weight, "offsets": [16]}] * doubled
    _plant(step, "layout.json", json.dumps(entries).encode())
    state: dict[str, Any] = {"weight": torch.zeros(64), "count": 0}
    with (
        CheckpointManager(tmp_path, backend=BACKEND) as manager,
        pytest.raises(CheckpointCorruptError, match="overlap or do not cover the tensor"),
    ):
        manager.resume(state)
    assert not state["weight"].any()


def _resume_with_little_memory(rank: int, home: Path) -> str:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 512 * 2**20, resource.RLIM_INFINITY))
    with (
        CheckpointManager(home, backend=BACKEND) as manager,
        pytest.raises(CheckpointCorruptError) as caught,
    ):
        manager.resume({"weight": torch.zeros(30_000), "count": 0})
    return str(caught.value)


def test_thousands_of_parts_take_no_memory_for_each_pair_of_them(tmp_path: Path) -> None:
    """A forged layout: each element of a tensor is a part, all in the same bytes."""
    _saved(tmp_path)
    step = tmp_path / "global_step_2"
    entries = json.loads((step / "layout.json").read_text())
    weight = next(entry for entry in entries if entry["name"] == "weight")
    forged = [{**weight, "shape": [30_000], "offsets": [at], "sizes": [1]} for at in range(30_000)]
    _plant(step, "layout.json", json.dumps([*forged, *(one for one in entries if one is not weight)]).encode())
    assert "in __0_0.distcp, which has fewer" in run_processes(_resume_with_little_memory, 1, tmp_path)[0]


@given(
    st.integers(0, 3).flatmap(
        lambda axes: st.lists(st.lists(st.tuples(_NUMBER, _NUMBER), min_size=axes, max_size=axes), max_size=6)
    )
)
def test_chunks_are_disjoint_if_no_two_of_them_share_an_element(chunks: list[list[tuple[int, int]]]) -> None:
    elements = [set(itertools.product(*(range(begin, begin + length) for begin, length in chunk))) for chunk in chunks]
    apart = not any(one & other for one, other in itertools.combinations(elements, 2))
    assert (
        are_disjoint(
            [
                ChunkStorageMetadata(torch.Size([begin for begin, _ in one]), torch.Size([length for _, length in one]))
                for one in chunks
            ]
        )
        == apart
    )


def test_a_directory_in_the_place_of_the_tracker_is_refused_before_anything_is_saved(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with pytest.raises(CheckpointError, match=r"(?s)cannot keep checkpoints.*latest_.* is a directory"):
        CheckpointManager(tmp_path, backend=BACKEND)


def _obey_permissions() -> None:
    """Give up root's right to write anywhere: all capabilities, in the form of capset(2)."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0


def _open_read_only(rank: int, home: Path) -> str:
    (home / ".hwrl.lock").unlink()
    for path in (home, *home.rglob("*")):
        path.chmod(0o555)
    _obey_permissions()
    complete, skipped = find_checkpoints(home)
    assert [info.step for info in complete] == [1, 2] and not skipped
    for info in complete:
        with hold_for_reading(info):
            verify_files(info, info.manifest.files)
    with pytest.raises(CheckpointError) as caught:
        CheckpointManager(home, backend=BACKEND)
    return str(caught.value)


def test_a_read_only_directory_can_be_read_and_is_refused_for_saving(tmp_path: Path) -> None:
    home = tmp_path / "home"
    _saved(home)
    text = run_processes(_open_read_only, 1, home)[0]
    assert f"cannot keep checkpoints in {home}" in text and "Permission denied" in text
    for path in (home, *home.rglob("*")):
        path.chmod(0o755)  # pytest must remove it


def test_the_step_of_a_checkpoint_with_wrong_content_can_be_saved_again_and_nothing_is_deleted(tmp_path: Path) -> None:
    _saved(tmp_path)
    _flip(tmp_path / "global_step_2" / "__0_0.distcp", -200)
    wrong = (tmp_path / "global_step_2" / "__0_0.distcp").read_bytes()
    state = {"weight": torch.zeros(64), "count": 0}
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        assert manager.resume(state) is not None
        assert (tmp_path / "global_step_2").exists(), "reading changes nothing"
        manager.save(2, {"weight": torch.ones(64), "count": 22})
        resumed = manager.resume(state)
        manager.save(3, state)
        assert [info.step for info in manager.checkpoints()] == [1, 2, 3], "what was saved again is good"
    assert resumed is not None and (resumed.step, state["count"], resumed.skipped) == (2, 22, [])
    aside = list(tmp_path.glob(".broken_global_step_2.*"))
    assert [path.joinpath("__0_0.distcp").read_bytes() for path in aside] == [wrong]
