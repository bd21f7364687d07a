"""Files that are written as a stream are what safetensors and transformers read."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hwrl.errors import DataError
from hwrl.safetensors_files import TensorFiles, write_tensors

TENSORS = {
    "a": torch.randn(5, 3, dtype=torch.float32),
    "b": torch.randn(7).to(torch.bfloat16),
    "odd": torch.randn(1).to(torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "large items again": torch.arange(4, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "one": torch.tensor(3.5),
}


def described() -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor.to("meta")) for name, tensor in TENSORS.items())


def test_one_file_and_several_hold_the_tensors(tmp_path: Path) -> None:
    for file_nbytes in (1 << 30, 40):
        write_tensors(tmp_path, described(), iter(TENSORS.items()), file_nbytes=file_nbytes)
        paths = sorted(tmp_path.glob("*.safetensors"))
        found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        assert found.keys() == TENSORS.keys()
        assert all(
            torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
        )
        files = TensorFiles.of(tmp_path)
        assert files is not None
        assert all(torch.equal(files.read(name), tensor) for name, tensor in TENSORS.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - not a mapping
            assert opened.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())


def test_a_small_model_of_one_dtype_is_one_file(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier model")
    write_tensors(tmp_path, [(name, one.to("meta")) for name, one in tensors.items()], iter(tensors.items()))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_one_tensor_at_a_time_is_alive(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            assert sum(one() is not None for one in alive) <= 1
            new = tensor.clone()
            alive.append(weakref.ref(new))
            yield name, new
            del new

    write_tensors(tmp_path, described(), made())


@pytest.mark.parametrize("wrong", [{**TENSORS, "b": torch.ones(2)}, dict(list(TENSORS.items())[:-1])])
def test_a_model_that_is_not_as_described_is_no_model(tmp_path: Path, wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="came, and not"):
        write_tensors(tmp_path, described(), iter(wrong.items()))
    assert not (tmp_path / "model.safetensors").exists()
    assert not list(tmp_path.glob(".tmp_*")) and not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", "a/b.safetensors"])
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError, match="is not the name of a file beside it"):
        TensorFiles.of(tmp_path)


def test_a_dtype_without_a_code_is_refused_by_name(tmp_path: Path) -> None:
    scale = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(DataError, match=r"'scale'.*\n.*complex64"):
        write_tensors(tmp_path, iter([("scale", scale)]), iter([("scale", scale)]))
    assert not list(tmp_path.iterdir())
