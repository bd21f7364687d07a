"""The inventory of several nodes, and the ranks of each node."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import TRACKER_NAME, CheckpointManager, Manifest
from hwrl.checkpoint.nodes import group_by_seen_ranks, merge_looks
from hwrl.errors import CheckpointError, CheckpointNotFoundError
from hwrl_cpu import INFO, CpuBackend


def _view(saves: dict[int, str], *, announced: int = -1, node: int = 0, nodes: int = 2) -> dict[str, Any]:
    intact = {f"global_step_{step}": [save_id, node, nodes] for step, save_id in saves.items()}
    return {"host": "h", "intact": intact, "skipped": {}, "announced_step": announced}


def test_a_step_counts_only_if_all_nodes_have_it_of_the_same_save() -> None:
    first = _view({1: "a", 2: "b", 3: "c"}, announced=2)
    found = merge_looks([first, _view({2: "b", 3: "other"}, announced=2, node=1)])
    assert (found.complete, found.newest) == ([2], 2)
    assert found.skipped == {"global_step_3": "the nodes have parts of different saves"}


@pytest.mark.parametrize(("announced", "lost"), [(-1, False), (1, True)])
def test_only_what_a_tracker_named_can_be_lost(announced: int, lost: bool) -> None:
    found = merge_looks([_view({1: "a"}, announced=announced), _view({}, node=1)])
    assert (found.complete, found.lost) == ([], lost)
    assert found.skipped == {"global_step_1": "of 2 nodes, only these have it: 0 (h)"}


@pytest.mark.parametrize(
    ("announced", "complete", "lost"),
    [(3, [2, 3], False), (2, [2], True), (-1, [], True)],
    ids=["all committed", "perhaps half committed", "no tracker"],
)
def test_without_all_nodes_only_a_tracker_proves_a_step_complete(
    announced: int, complete: list[int], lost: bool
) -> None:
    views = [_view({2: "b", 3: "c"}, announced=announced, node=node, nodes=3) for node in (0, 2)]
    found = merge_looks(views)
    assert (found.complete, found.lost) == (complete, lost)
    assert ("global_step_3" in found.skipped) is (3 not in complete)


def test_all_nodes_together_prove_a_step_complete_without_a_tracker() -> None:
    found = merge_looks([_view({3: "c"}, node=node) for node in (1, 0)])
    assert (found.complete, found.skipped) == ([3], {})


def _make_parts(directory: Path, *, announced: int) -> None:
    """Make steps 1 and 2 what node 0 of two has, killed before it announced the steps after ``announced``."""
    with CheckpointManager(directory, backend=CpuBackend(INFO)) as manager:
        for step in (1, 2):
            manager.save(step, {"same": torch.full((2,), float(step))})
        for info in manager.checkpoints():
            manifest: Manifest = replace(info.manifest, nodes=2)
            (info.path / "MANIFEST.json").write_bytes(manifest.to_bytes())
    (directory / TRACKER_NAME).write_text(str(announced))


def test_one_node_alone_does_not_resume_a_step_that_the_other_may_lack(tmp_path: Path) -> None:
    _make_parts(tmp_path, announced=1)
    state = {"same": torch.zeros(2)}
    with CheckpointManager(tmp_path, backend=CpuBackend(INFO)) as manager:
        assert (tmp_path / TRACKER_NAME).read_text() == "1", "prune and retention rely on it"
        resumed = manager.resume(state)
        assert resumed is not None and (resumed.step, state["same"].tolist()) == (1, [1.0, 1.0])
        assert [(item.path.name, item.reason.split(",")[0]) for item in resumed.skipped] == [
            ("global_step_2", "2 nodes saved it")
        ]
        manager.save(2, state)  # the part is put aside, so that the step can be saved again
        assert [info.manifest.nodes for info in manager.checkpoints()] == [2, 1]
    assert len(list(tmp_path.glob(".broken_global_step_2.*"))) == 1


def test_one_node_alone_does_not_start_afresh_beside_steps_that_may_be_complete(tmp_path: Path) -> None:
    _make_parts(tmp_path, announced=-1)
    with (
        CheckpointManager(tmp_path, backend=CpuBackend(INFO)) as manager,
        pytest.raises(CheckpointNotFoundError, match="2 nodes saved it"),
    ):
        manager.resume({"same": torch.zeros(2)})


def test_ranks_that_see_each_other_are_a_node_and_what_does_not_fit_is_refused() -> None:
    seen = [("a", [0, 1]), ("a", [0, 1]), ("b", [2])]
    assert group_by_seen_ranks(seen) == [[0, 1], [2]]
    with pytest.raises(CheckpointError, match="share a directory with rank 0 on a"):
        group_by_seen_ranks([("a", [0, 1]), ("b", [1])])


@pytest.mark.parametrize("ranks", [[], [1]])
def test_a_rank_without_its_own_file_learns_that_another_run_writes_there(ranks: list[int]) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)rank 0 on a already has a writer.*is gone"):
        group_by_seen_ranks([("a", ranks), ("a", ranks)])
