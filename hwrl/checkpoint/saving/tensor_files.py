"""A rank's tensors in files, several at a time: :func:`write_items`."""

from __future__ import annotations

import functools
import io
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import WriteItem

from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.format.layout import Json, encode_entry
from hwrl.checkpoint.saving.state import SaveSource

MAX_FILES = 4
"""Per rank. A thread writes and hashes each; both leave the interpreter to the trainer."""
MIN_FILE_NBYTES = 64 << 20

_Result = TypeVar("_Result")


def write_items(
    fs: DurableFS, directory: Path, rank: int, items: Sequence[WriteItem], source: SaveSource
) -> list[Json]:
    """Write ``items`` into files ``__<rank>_<number>.distcp``, as torch's writer does; return the layout's entries.

    All files are durable when this returns. Raises what the first of them failed with when all have ended.
    """

    def write(number: int, share: list[WriteItem]) -> list[Json]:
        name = f"__{rank}_{number}.distcp"
        with fs.create_stream(directory / name, "wb") as stream:
            return [_write_item(stream, name, item, source) for item in share]

    source.choose(items)
    written = _at_once([functools.partial(write, *numbered) for numbered in enumerate(_divide(items))])
    return [entry for entries in written for entry in entries]


def _write_item(stream: Any, name: str, item: WriteItem, source: SaveSource) -> Json:
    start = stream.tell()
    with source.reading(item) as data:
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(data, stream)
    return encode_entry(item, keys=source.keys(item), file=name, start=start, nbytes=stream.tell() - start)


def _divide(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide ``items`` evenly, the largest first; within a share they keep their order."""
    sizes = [_nbytes(item) for item in items]
    shares: list[list[int]] = [[] for _ in range(max(1, min(MAX_FILES, sum(sizes) // MIN_FILE_NBYTES)))]
    filled = [0] * len(shares)
    for position in sorted(range(len(items)), key=lambda position: -sizes[position]):
        emptiest = filled.index(min(filled))
        shares[emptiest].append(position)
        filled[emptiest] += sizes[position]
    return [[items[position] for position in sorted(share)] for share in shares]


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _at_once(actions: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run each action in a thread of its own. No executor: those take no work from a program that is about to end."""
    futures: list[Future[_Result]] = [Future() for _ in actions]

    def run(action: Callable[[], _Result], future: Future[_Result]) -> None:
        try:
            future.set_result(action())
        except BaseException as exc:  # noqa: BLE001 - raised again by who asks for the result
            future.set_exception(exc)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(actions, futures, strict=True)]
    for thread in threads:
        thread.start()
    try:
        wait(futures)  # no Thread.join: interrupted, it takes the thread for ended (bpo-45274)
    except BaseException:  # an interrupt: they still read what the caller will change
        wait(futures)
        raise
    return [future.result() for future in futures]
