"""A rank's items in files, several written at a time: :func:`write_tensor_files`."""

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
from hwrl.checkpoint.saving.state import ItemPlan, StateReader
from hwrl.checkpoint.saving.tuning import SaveTuning

_ResultT = TypeVar("_ResultT")


def write_tensor_files(
    fs: DurableFS,
    directory: Path,
    rank: int,
    items: Sequence[WriteItem],
    plan: ItemPlan,
    reader: StateReader,
    tuning: SaveTuning,
) -> list[Json]:
    """Write ``items`` into files ``__<rank>_<number>.distcp``, as torch's writer does; return the layout's entries.

    All files are durable when this returns. If files fail, raises the error of the first one when all have ended.
    """

    def write(number: int, share: list[WriteItem]) -> list[Json]:
        name = f"__{rank}_{number}.distcp"
        with fs.create_stream(directory / name, "wb") as stream:
            return [_write_item(stream, name, item, plan, reader) for item in share]

    written = _run_in_threads(
        [functools.partial(write, *numbered) for numbered in enumerate(_share_out(items, tuning))]
    )
    return [entry for entries in written for entry in entries]


def _write_item(stream: Any, name: str, item: WriteItem, plan: ItemPlan, reader: StateReader) -> Json:
    start = stream.tell()
    with reader.reading(item) as data:
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(data, stream)
    return encode_entry(item, keys=plan.keys[item.index.fqn], file=name, start=start, nbytes=stream.tell() - start)


def _share_out(items: Sequence[WriteItem], tuning: SaveTuning) -> list[list[WriteItem]]:
    """Divide ``items`` evenly over files, the largest first. Within a file they keep their order."""
    sizes = [_nbytes(item) for item in items]
    count = max(1, min(tuning.max_files, sum(sizes) // tuning.min_file_nbytes))
    shares: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for position in sorted(range(len(items)), key=lambda position: -sizes[position]):
        emptiest = filled.index(min(filled))
        shares[emptiest].append(position)
        filled[emptiest] += sizes[position]
    return [[items[position] for position in sorted(share)] for share in shares]


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _run_in_threads(actions: Sequence[Callable[[], _ResultT]]) -> list[_ResultT]:
    """Run each action in a thread of its own. An executor would refuse work while the program is ending."""
    futures: list[Future[_ResultT]] = [Future() for _ in actions]

    def run(action: Callable[[], _ResultT], future: Future[_ResultT]) -> None:
        try:
            future.set_result(action())
        except BaseException as exc:  # noqa: BLE001 - raised again by future.result()
            future.set_exception(exc)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(actions, futures, strict=True)]
    for thread in threads:
        thread.start()
    try:
        wait(futures)  # not Thread.join: after an interrupt it takes a running thread for ended (bpo-45274)
    except BaseException:  # an interrupt: the threads still read the state, and the caller will change it
        wait(futures)
        raise
    return [future.result() for future in futures]
