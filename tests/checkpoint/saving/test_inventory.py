"""The inventory of several nodes, and the ranks of each node."""

import pytest

from hwrl.checkpoint.saving.inventory import NodeInventory, RankInventory, merge_inventories
from hwrl.checkpoint.saving.nodes import Sight, group_by_sight
from hwrl.errors import CheckpointError


def _view(saves: dict[int, str], *, announced: int = -1) -> RankInventory:
    intact = {f"global_step_{step}": save_id for step, save_id in saves.items()}
    return RankInventory(NodeInventory(host="h", intact=intact, skipped={}, announced=announced))


def test_a_step_counts_only_if_all_nodes_have_it_of_the_same_save() -> None:
    found = merge_inventories([_view({1: "a", 2: "b", 3: "c"}, announced=2), _view({2: "b", 3: "other"}, announced=2)])
    assert (found.complete, found.newest) == ([2], 2)
    assert found.skipped == {"global_step_3": "the nodes have it of different saves"}


@pytest.mark.parametrize(("announced", "lost"), [(-1, False), (1, True)])
def test_only_what_a_tracker_named_can_be_lost(announced: int, lost: bool) -> None:
    found = merge_inventories([_view({1: "a"}, announced=announced), _view({})])
    assert (found.complete, found.lost) == ([], lost)
    assert found.skipped == {"global_step_1": "of 2 nodes only 0 (h) have it"}


def test_ranks_that_see_each_other_are_a_node_and_what_does_not_fit_is_refused() -> None:
    assert group_by_sight([Sight("a", [0, 1]), Sight("a", [0, 1]), Sight("b", [2])]) == [[0, 1], [2]]
    with pytest.raises(CheckpointError, match="rank 0 on a among them"):
        group_by_sight([Sight("a", [0, 1]), Sight("b", [1])])


@pytest.mark.parametrize("ranks", [[], [1]])
def test_a_rank_without_its_own_file_learns_that_another_run_writes_there(ranks: list[int]) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)rank 0 on a already has a writer.*is gone"):
        group_by_sight([Sight("a", ranks), Sight("a", ranks)])
