"""Safetensors files: read slices of a directory's tensors, and write tensors as a stream into several files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hwrl.errors import DataError
from hwrl.files import replacing

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_NBYTES = 4 << 30
"""The size from which a model is written into several files."""

_MAPPED_NBYTES = 8 << 20
"""Bytes that are read before a file is opened again: pages of a mapped file count as the process's memory."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class TensorFiles:
    """The tensors in ``paths``, safetensors files. Their headers are read at once, and a tensor when it is asked for.

    ``shapes`` has the shape of each tensor, ``dtypes`` its dtype; None: not one of torch's usual dtypes. Raises
    DataError for a path that is no regular file, SafetensorError or OSError for a damaged or unreadable file.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self._paths: dict[str, Path] = {}
        self._opened: tuple[Path, Any] | None = None
        self._mapped_nbytes = 0
        for path in paths:
            _require_file(path)
            opened = _open(path)
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                one = opened.get_slice(name)
                self._paths[name], self.shapes[name] = path, tuple(one.get_shape())
                self.dtypes[name] = _DTYPES.get(one.get_dtype())

    @classmethod
    def of(cls, directory: Path) -> TensorFiles | None:
        """Return the files that transformers reads in ``directory``; None if it has no safetensors files."""
        if os.path.lexists(directory / SINGLE_FILE):
            return cls([directory / SINGLE_FILE])
        if not (directory / INDEX).is_file():
            return None
        return cls(directory / name for name in _indexed_files(directory / INDEX))

    def read(self, name: str, index: Sequence[slice] = ()) -> torch.Tensor:
        """Return the slice ``index`` of the tensor ``name``, on the host, in the file's dtype.

        Without ``index`` it is all of the tensor. The memory is the mapped file's: copy the values soon and drop the
        tensor, as only then its pages are given back. KeyError for an unknown name.
        """
        path = self._paths[name]
        if self._opened is None or self._opened[0] != path or self._mapped_nbytes > _MAPPED_NBYTES:
            self._opened, self._mapped_nbytes = (path, _open(path)), 0
        opened = self._opened[1]
        if not index:
            found: torch.Tensor = opened.get_tensor(name)
        else:
            found = opened.get_slice(name)[tuple(index)]
        self._mapped_nbytes += found.nbytes
        return found

    def close(self) -> None:
        """Give back the mapped pages; a later read opens the file again."""
        self._opened = None


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(
            f"{path} cannot be read",
            why="it is not a regular file"
            if os.path.lexists(path)
            else "it is missing, and the directory's index names it",
            fix="download or save the model again",
        )


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files in the index of a model in several files; DataError if it is no index."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"{outside[0]!r} is not the name of a file beside it")
        return names
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise DataError(
            f"{index} cannot be used",
            why=f"it is no index of weights: {exc!r}",
            fix="download or save the model again",
        ) from exc


# -- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlannedFile:
    name: str
    tensors: Sequence[tuple[str, torch.Tensor]]
    """Meta tensors, in the order of the file."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)


def write_tensors(
    directory: Path,
    described: Iterable[tuple[str, torch.Tensor]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    file_nbytes: int = _FILE_NBYTES,
) -> None:
    """Write ``tensors`` to ``directory`` as transformers names the files: one, or several with an index.

    ``described`` are the same tensors on the meta device, in the same order. A file has up to ``file_nbytes`` bytes,
    but at least a tensor. One tensor at a time is copied to the host. A file gets its name when it is complete, and the
    index comes last; files of an earlier model are removed first. Raises OSError if a file cannot be written, and
    ValueError if a tensor is not as described.
    """
    planned = _planned(described, file_nbytes)
    directory.mkdir(parents=True, exist_ok=True)
    for old in [*directory.glob("model*.safetensors"), directory / INDEX]:
        old.unlink(missing_ok=True)
    rest = iter(tensors)
    for file in planned:
        _write_file(directory / file.name, file, rest)
    if len(planned) > 1:
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in planned)},
            "weight_map": {name: file.name for file in planned for name, _ in file.tensors},
        }
        with replacing(directory / INDEX) as out:
            out.write(json.dumps(index, indent=2).encode())


def _planned(described: Iterable[tuple[str, torch.Tensor]], file_nbytes: int) -> list[_PlannedFile]:
    """Divide the tensors into files. Items only get smaller in a file: each must lie at a multiple of its size."""
    files: list[list[tuple[str, torch.Tensor]]] = []
    nbytes = 0
    for name, tensor in described:
        grows = bool(files) and tensor.dtype.itemsize > files[-1][-1][1].dtype.itemsize
        if not files or grows or nbytes + tensor.nbytes > file_nbytes:
            files.append([])
            nbytes = 0
        files[-1].append((name, tensor))
        nbytes += tensor.nbytes
    if len(files) == 1:
        return [_PlannedFile(SINGLE_FILE, files[0])]
    return [
        _PlannedFile(f"model-{number:05}-of-{len(files):05}.safetensors", tensors)
        for number, tensors in enumerate(files, 1)
    ]


def _write_file(path: Path, file: _PlannedFile, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    with replacing(path) as out:
        out.write(_header(file.tensors))
        for name, wanted in file.tensors:
            found, tensor = next(tensors, ("nothing", torch.empty(0)))
            if (name, wanted.shape, wanted.dtype) != (found, tensor.shape, tensor.dtype):
                came = f"{found} ({tensor.dtype}, {list(tensor.shape)})"
                raise ValueError(f"{came} came, and not {name} ({wanted.dtype}, {list(wanted.shape)})")
            out.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """Return the head of a safetensors file: its length in 8 bytes, then names, dtypes, shapes and places as JSON."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors:
        if tensor.dtype not in _CODES:
            raise DataError(
                f"tensor {name!r} cannot be written to a safetensors file",
                why=f"its dtype is {tensor.dtype}",
                fix=f"convert it to one of {', '.join(map(str, _CODES))}",
            )
        stop = start + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
