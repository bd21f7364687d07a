"""The rounds of a save on several ranks: how many there are, and when the ranks send their plans."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import DurableFS, LocalShards
from hwrl.checkpoint.shards import assign, local_tensors
from hwrl.comm import Comm, Group, connect_store, serve_store, store_address
from hwrl.errors import CheckpointError, CheckpointSaveError
from hwrl.testing.processes import Processes
from tests.support import group_ranks
from tests.support.speed import slow
from tests.support.two_nodes import BACKEND, on_ranks, open_manager, save

TIMEOUT_S = slow(4.0)


class Reading(DurableFS):
    """Notes the size of this rank's first message when its tensors are written, and the number of the last round."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group, self.sent_nbytes, self.rounds = group, 0, 0

    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.name == f"__{self._group.rank}_0.distcp":
            [key] = [key for key in self._group.store.list_keys() if key.endswith(f".0/part{self._group.rank}")]
            self.sent_nbytes = len(self._group.store.get(key))

    def count_rounds(self) -> int:
        """Return how many rounds the last call had. The keys of the last one are still in the store."""
        numbers = [re.search(r"round\d+\.(\d+)/", key) for key in self._group.store.list_keys()]
        return 1 + max(int(number[1]) for number in numbers if number)


def _count_rounds(group: Group, directory: Path) -> list[int]:
    fs, counts = Reading(group), []
    with open_manager(group, directory, fs=fs, max_ckpt_to_keep=1) as manager:
        for step in (1, 2):
            save(manager, group, step)
            counts.append(fs.count_rounds())
            group.barrier()
    return counts


def test_a_save_has_four_rounds_also_on_several_nodes(tmp_path: Path) -> None:
    assert on_ranks(_count_rounds, 2, tmp_path) == [[4, 4]] * 2
    (tmp_path / "node0").rename(tmp_path / "first")
    (tmp_path / "node1").rename(tmp_path / "second")
    (tmp_path / "node0").mkdir()
    (tmp_path / "node1").symlink_to(tmp_path / "node0")  # one directory of both
    assert on_ranks(_count_rounds, 2, tmp_path) == [[4, 4]] * 2


# -- plans ------------------------------------------------------------------------------------------------------


def _state(layout: str, group: Group, value: int) -> dict[str, Any]:
    rank, row = group.rank, torch.full((1, 2), float(value))
    state: dict[str, Any] = {
        "same": torch.full((3,), float(value)),
        f"of rank {rank}": torch.full((2,), float(value)),
        "rows": LocalShards((2, 2), torch.float32, {(1 - rank if layout == "turned" else rank, 0): row}),
        "count": value,
    }
    if layout == "wider":
        state["same"] = torch.full((5,), float(value))
    if layout == "half":
        state["same"] = state["same"].half()
    if layout == "number":
        state["same"] = value
    if layout == "more" and rank == 1:
        state["more"] = torch.full((2,), float(value))
    return state


LAYOUTS = ["first", "first", "wider", "wider", "half", "half", "first", "more", "turned", "turned", "number", "first"]
SENDS = [
    [True, False, True, False, True, True, True, False, True, False, True, True],  # rank 0 was refused before the sixth
    [True, False, True, False, True, False, True, True, True, False, True, True],
]
"""On each rank, for each of the layouts: whether it sends its items."""


def _save_layouts(group: Group, directory: Path) -> list[int]:
    fs, sent_nbytes = Reading(group), []
    with open_manager(group, directory, fs=fs, max_ckpt_to_keep=1) as manager:
        for step, layout in enumerate(LAYOUTS, start=1):
            if step == 6:  # rank 0 forgets the plan
                with pytest.raises(CheckpointSaveError):
                    manager.save(step, _state(layout, group, step), extra={"a": (1, 2)} if group.rank else {})
            manager.save(step, _state(layout, group, step))
            sent_nbytes.append(fs.sent_nbytes)
            found = _state(layout, group, -1)
            assert manager.resume(found) is not None and found["count"] == step
            assert all((tensor == step).all() for _, tensor in local_tensors(found)), layout
    return sent_nbytes


def test_a_plan_is_sent_again_only_by_the_ranks_whose_items_have_changed(tmp_path: Path) -> None:
    for rank, sent in enumerate(group_ranks.on_ranks(_save_layouts, 2, tmp_path)):
        assert [nbytes > min(sent) * 1.3 for nbytes in sent] == SENDS[rank], sent


def test_the_rank_with_least_to_write_gets_a_chunk_and_the_lowest_rank_a_value() -> None:
    chunk = {"name": "w", "kind": "SHARD", "dtype": "float32", "shape": [8], "offsets": [0], "sizes": [4]}
    other = {**chunk, "offsets": [4]}
    value = {"name": "n", "kind": "BYTE_IO"}
    assert assign([[value, chunk, other], [other, chunk, value]]) == [[0, 1], [0]]
    assert assign([[], [value], [value, chunk]]) == [[], [0], [1]]


def _refused_on_rank_0(group: Group, directory: Path) -> tuple[float, str]:
    with open_manager(group, directory, timeout_s=60.0) as manager:
        begun_s = time.monotonic()
        with pytest.raises(CheckpointSaveError) as caught:
            manager.save(1, {"w": torch.ones(2)}, extra={} if group.rank else {"a": (1, 2)})
        waited_s = time.monotonic() - begun_s
        save(manager, group, 2)
        return waited_s, str(caught.value)


def test_a_refusal_on_rank_0_is_heard_by_the_leaders_of_all_nodes(tmp_path: Path) -> None:
    for waited_s, text in on_ranks(_refused_on_rank_0, 2, tmp_path):
        assert "extra" in text and "no answer" not in text
        assert waited_s < 50.0, "a leader waited for rank 0 until the time was up"


def _save_differing(group: Group, directory: Path) -> str:
    with open_manager(group, directory, max_ckpt_to_keep=1) as manager:
        manager.save(1, {"same": torch.ones(2)})
        with pytest.raises(CheckpointSaveError) as caught:
            manager.save(2, {"same": torch.ones(2, dtype=torch.float16 if group.rank else torch.float32)})
        found = {"same": torch.zeros(2)}
        assert manager.resume(found) is not None and found["same"].tolist() == [1.0, 1.0]
        return str(caught.value)


def test_a_tensor_of_another_dtype_on_one_rank_is_refused_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    for text in group_ranks.on_ranks(_save_differing, 2, tmp_path):
        assert "'same' is torch.float32 [2] in one entry and torch.float16 [2] in another" in text


class Dying(DurableFS):
    """Ends the process of rank 1 when it writes its first file."""

    def before(self, operation: str, path: Path) -> None:
        if path.name.startswith("__1_"):
            os._exit(1)


def _lose_a_writer(rank: int, address: str, directory: Path) -> float:
    group = Comm(BACKEND).standalone_group(connect_store(address), rank=rank, size=2, name="all")
    manager = open_manager(group, directory, fs=Dying(), timeout_s=TIMEOUT_S)
    begun_s = time.monotonic()
    with pytest.raises(CheckpointError, match="no answer from rank 1"):
        manager.save(1, {f"own{rank}": torch.ones(2)})
    return time.monotonic() - begun_s


def test_a_rank_that_is_lost_while_it_writes_costs_its_timeout_once(tmp_path: Path) -> None:
    store = serve_store()
    with Processes(_lose_a_writer, 2, store_address(store), tmp_path) as processes:
        result = processes.wait(0)
    assert result.error is None, result.error
    assert result.value < 1.8 * TIMEOUT_S
