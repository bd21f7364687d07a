"""Read the rows of a data set.

It is a file of JSON Lines or Parquet, a directory from the library ``datasets``, or a name on the hub of that library.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from hwrl.errors import DataError, message_of
from hwrl.files import open_to_read, read_file
from hwrl.hub import HUB, is_on_hub

_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""A directory from ``datasets`` has the first file if it is one data set, the second if it has several splits."""
_MAX_LINE_NBYTES, _MAX_STATE_NBYTES = 1 << 28, 1 << 26
_OPTIONS = {"split": "split", "config": "name", "revision": "revision"}
"""The options in a name on the hub, each with its parameter of ``datasets.load_dataset``."""

PlacedRow = tuple[str, dict[str, Any]]
"""A row with its place (file and line, say) for error messages, the place first."""


def read_rows(path: Path, *, key: str, content: bytes | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of the data set ``path``, each with its place. Reads ``content`` instead of the file, if given.

    Raises DataError if there is no such data set, if it cannot be read, or if it is empty. ``key`` is the configuration
    key with the value ``path``, for the message.
    """
    place = None
    for place, row in _reader(path, key=key)(path, content):
        yield place, row
    if place is None:
        raise DataError(f"{path} holds no prompts", why="it has no rows", fix="add at least one row")


def digest_rows(path: Path) -> str:
    """Return a hash of the data set ``path``.

    It covers the bytes of a file, the names and bytes of a directory's files (hidden ones are left out), or the rows of
    a name on the hub. Raises OSError for an unreadable file, and DataError for a name that cannot be loaded.
    """
    total = hashlib.sha256()
    if is_on_hub(path):
        for _, row in _hub_rows(path, None):
            total.update(json.dumps(row, sort_keys=True, default=repr).encode())
        return total.hexdigest()
    if not path.is_dir():
        return _digest_file(path)
    for file in sorted(path.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            total.update(f"{file.relative_to(path).as_posix()}\0{_digest_file(file)}\n".encode())
    return total.hexdigest()


def _digest_file(path: Path) -> str:
    with open_to_read(path, follow_links=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reader(path: Path, *, key: str) -> Callable[[Path, bytes | None], Iterator[tuple[str, Any]]]:
    if is_on_hub(path):
        return _hub_rows
    if path.is_dir():
        return _directory_rows
    if not path.is_file():
        fix = f"correct the path, or write {HUB}NAME?split=SPLIT for a data set on the hub"
        raise DataError(f"there is no file {path}", why=f"{key} names it", fix=fix)
    if path.suffix not in _READERS:
        raise DataError(
            f"{path} is of an unknown kind",
            why=f"its name must end in {' or '.join(_READERS)}, or be a directory of the library datasets",
            fix="convert or rename the file",
        )
    return _READERS[path.suffix]


# -- files ----------------------------------------------------------------------------------------------------------


def _json_lines(path: Path, content: bytes | None) -> Iterator[tuple[str, Any]]:
    with open_to_read(path, follow_links=True) if content is None else io.BytesIO(content) as lines:
        for number, line in enumerate(iter(partial(lines.readline, _MAX_LINE_NBYTES), b""), start=1):
            place = f"{path}, line {number}"
            if len(line) == _MAX_LINE_NBYTES:
                raise DataError(f"{place} is too long", why="it has 256 MiB or more", fix="shorten or divide the row")
            line = line.strip()
            if not line:
                continue
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as exc:
                why = f"{exc.msg}, column {exc.colno}" if isinstance(exc, json.JSONDecodeError) else str(exc)
                raise DataError(f"{place} is not JSON", why=why, fix="correct the line") from exc
            yield place, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # json would keep the last one
        raise ValueError(f"a key appears twice in one object: {[key for key, _ in pairs]}")
    return found


def _parquet_rows(path: Path, content: bytes | None) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as pq

    try:
        with open_to_read(path, follow_links=True) if content is None else io.BytesIO(content) as file:
            rows = pq.read_table(file).to_pylist()
    except Exception as exc:  # damaged, or it has values that Python cannot hold, such as far dates
        fix = "write the file again, with values that Python can hold"
        raise DataError(f"{path} cannot be read as Parquet", why=message_of(exc), fix=fix) from exc
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


_READERS = {".jsonl": _json_lines, ".parquet": _parquet_rows}


# -- the library datasets -------------------------------------------------------------------------------------------


def _directory_rows(path: Path, content: bytes | None) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a directory from ``Dataset.save_to_disk``. A JSON file names its Arrow streams."""
    import pyarrow as pa

    if not (path / _STATE).is_file():
        splits = sorted(one.parent.name for one in path.glob(f"*/{_STATE}"))
        one_of_them = f"name one of its splits: {', '.join(str(path / split) for split in splits)}"
        raise DataError(
            f"{path} is not a data set",
            why="it has several splits" if splits else f"it has no {_STATE}, which save_to_disk of datasets writes",
            fix=one_of_them if splits else "save it with Dataset.save_to_disk, or name a .jsonl or .parquet file",
        )
    number = 0
    try:
        state = read_file(path / _STATE, max_nbytes=_MAX_STATE_NBYTES, follow_links=True)
        for entry in json.loads(state)["_data_files"]:
            stream = path / entry["filename"]
            open_to_read(stream, follow_links=True).close()  # a pipe would wait for its other end
            with pa.memory_map(str(stream)) as file, pa.ipc.open_stream(file) as batches:
                for row in (row for batch in batches for row in batch.to_pylist()):
                    number += 1
                    yield f"{path}, row {number}", row
    except Exception as exc:  # as in Parquet
        raise DataError(f"{path} cannot be read", why=message_of(exc), fix="save the data set again") from exc


def _hub_rows(path: Path, content: bytes | None) -> Iterator[tuple[str, Any]]:
    name, options = _parse_name(str(path))
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{path} cannot be loaded",
            why="datasets, the library that loads data sets by name, is not installed",
            fix="pip install 'hwrl[datasets]', or name a file",
        )
    try:
        rows = importlib.import_module("datasets").load_dataset(name, **options)
    except Exception as exc:
        raise DataError(
            f"{path} cannot be loaded",
            why=f"{type(exc).__name__}: {exc}",
            fix="correct the name, its config or split; without a network, save it with Dataset.save_to_disk before",
        ) from exc
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _parse_name(text: str) -> tuple[str, dict[str, str]]:
    """Return the name in ``text``, and the options for ``datasets.load_dataset``. Raises DataError.

    >>> _parse_name("hf:openai/gsm8k?config=main&split=test")
    ('openai/gsm8k', {'name': 'main', 'split': 'test'})
    """
    name, _, query = text.removeprefix(HUB).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(_OPTIONS))
    if not name or unknown or not options.get("split"):
        raise DataError(
            f"{text} names no data set",
            why=f"it has the unknown option {unknown[0]}" if unknown else "it needs a name and a split",
            fix="write hf:NAME?split=SPLIT, and &config=… or &revision=… if need be",
        )
    return name, {_OPTIONS[key]: value for key, value in options.items()}
