"""Write a rank's items into several files in parallel: :func:`write_tensor_files`."""

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

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.layout import Json, encode_entry
from hwrl.checkpoint.state import CapturedStateReader, ItemPlan
from hwrl.checkpoint.tuning import SaveTuning

_ResultT = TypeVar("_ResultT")


def write_tensor_files(
    fs: DurableFS,
    directory: Path,
    rank: int,
    items: Sequence[WriteItem],
    plan: ItemPlan,
    reader: CapturedStateReader,
    tuning: SaveTuning,
) -> list[Json]:
    """Write ``items`` into files ``__<rank>_<number>.distcp``. Return the entries for the layout.

    The files have the names and the format of torch's writer; ``.metadata`` is written later. When this returns, the
    content of all files is durable. If files fail, this waits for all of them and raises the error of the first.
    """

    def write(number: int, file_items: list[WriteItem]) -> list[Json]:
        name = f"__{rank}_{number}.distcp"
        with fs.create_stream(directory / name, "wb") as stream:
            return [_write_item(stream, name, item, plan, reader) for item in file_items]

    written = _run_in_threads(
        [functools.partial(write, *numbered) for numbered in enumerate(_divide_over_files(items, tuning))]
    )
    return [entry for entries in written for entry in entries]


def _write_item(stream: Any, name: str, item: WriteItem, plan: ItemPlan, reader: CapturedStateReader) -> Json:
    start = stream.tell()
    with reader.reading(item) as data:
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(data, stream)
    state_path, nbytes = plan.state_paths[item.index.fqn], stream.tell() - start
    return encode_entry(item, state_path=state_path, file=name, start=start, nbytes=nbytes)


def _divide_over_files(items: Sequence[WriteItem], tuning: SaveTuning) -> list[list[WriteItem]]:
    """Divide ``items`` into files of about equal size. Within a file, the items keep their order.

    The items are placed in descending order of size, each into the file that is the smallest so far.
    """
    sizes = [_nbytes(item) for item in items]
    count = max(1, min(tuning.max_files, sum(sizes) // tuning.min_file_nbytes))
    positions: list[list[int]] = [[] for _ in range(count)]
    file_nbytes = [0] * count
    for position in sorted(range(len(items)), key=lambda position: -sizes[position]):
        smallest = file_nbytes.index(min(file_nbytes))
        positions[smallest].append(position)
        file_nbytes[smallest] += sizes[position]
    return [[items[position] for position in sorted(in_file)] for in_file in positions]


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _run_in_threads(actions: Sequence[Callable[[], _ResultT]]) -> list[_ResultT]:
    """Run each action in its own thread. (An executor cannot be used: it refuses work while the interpreter exits.)"""
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
        wait(futures)  # not Thread.join: after an interrupt it can report a running thread as ended (bpo-45274)
    except BaseException:  # an interrupt: wait for the threads, because they read a state that the caller will change
        wait(futures)
        raise
    return [future.result() for future in futures]
