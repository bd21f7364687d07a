from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hwrl.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    DurableFS,
    LocalShards,
    Manifest,
    SavedTensors,
    SaveTuning,
)
from hwrl.checkpoint.layout import seal
from hwrl.checkpoint.staging import CapturedState, StagingMemory
from hwrl.errors import CheckpointError, CheckpointSaveError, MemoryStateError
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""

WHOLE = torch.arange(40.0).view(4, 10)
RUNS: list[Rectangle] = [((0, 0), (1, 7)), ((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 10))]
QUARTERS: list[Rectangle] = [((row, column), (2, 5)) for row in (0, 2) for column in (0, 5)]


def cut(tensor: torch.Tensor, rectangles: list[Rectangle]) -> LocalShards:
    pieces = {
        offset: tensor[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))].clone()
        for offset, shape in rectangles
    }
    return LocalShards(tensor.shape, tensor.dtype, pieces)


@pytest.mark.parametrize("async_save", [False, True])
def test_what_was_saved_in_pieces_comes_back_in_others_and_whole(tmp_path: Path, async_save: bool) -> None:
    with CheckpointManager(tmp_path, async_save=async_save) as manager:
        manager.save(1, {"one": cut(WHOLE, RUNS)})
        others, plain = {"one": cut(torch.zeros(4, 10), QUARTERS)}, {"one": torch.zeros(4, 10)}
        manager.resume(others)
        manager.resume(plain)
        manager.save(2, plain)
        again = {"one": cut(torch.zeros(4, 10), RUNS)}
        manager.resume(again)
    assert torch.equal(plain["one"], WHOLE)
    for pieces, wanted in ((others["one"], cut(WHOLE, QUARTERS)), (again["one"], cut(WHOLE, RUNS))):
        assert all(torch.equal(piece, wanted.pieces[offset]) for offset, piece in pieces.pieces.items())


def test_pieces_that_overlap_are_not_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointSaveError):
            manager.save(1, {"one": cut(WHOLE, [*RUNS, ((0, 5), (2, 2))])})
        assert manager.checkpoints() == []


def test_a_nodes_part_is_not_sealed_if_no_load_could_read_it(tmp_path: Path) -> None:
    """torch's metadata would find it, but a node's part has none."""
    places = {"file": "__0_0.distcp", "start": 0, "nbytes": 16, "keys": ["w"]}
    whole = {"name": "w", "kind": "SHARD", "dtype": "float32", "shape": [4], "offsets": [0], "sizes": [4], **places}
    half = {**whole, "offsets": [2], "sizes": [2]}
    manifest = Manifest(1, "id", 1, weight_version=0, saved_unix_s=0.0, versions={}, files={}, nodes=2)
    with pytest.raises(ValueError, match="overlap or do not cover the tensor"):
        seal(DurableFS(), tmp_path, [whole, half], {}, manifest)
    seal(DurableFS(), tmp_path, [half], {}, manifest)


@pytest.mark.parametrize("there", [0, 2])
def test_a_rectangle_on_another_nodes_disk_is_missed_wherever_it_comes(tmp_path: Path, there: int) -> None:
    """This disk has two rows of four. The state has both halves, as two rectangles of one tensor."""
    fs = DurableFS()
    fs.write_file(tmp_path / "__0_0.distcp", bytes(16))
    place = {"file": "__0_0.distcp", "start": 0, "nbytes": 16, "keys": ["w"]}
    rows = {"name": "w", "kind": "SHARD", "dtype": "float32", "shape": [4, 2], "offsets": [2 - there, 0]}
    manifest = Manifest(1, "id", 1, weight_version=0, saved_unix_s=0.0, versions={}, files={}, nodes=2)
    info = CheckpointInfo(tmp_path, seal(fs, tmp_path, [{**rows, "sizes": [2, 2], **place}], {}, manifest))
    state = {"w": cut(torch.zeros(4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])}
    with pytest.raises(CheckpointError, match="this disk lacks some of 'w'"):
        SavedTensors(info).plan(state)


def test_pieces_of_another_shape_or_without_memory_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"one": WHOLE})
        with pytest.raises(CheckpointError, match="does not fit"):
            manager.resume({"one": cut(torch.zeros(4, 12), [((0, 0), (4, 12))])})
        away = cut(WHOLE, RUNS)
        next(iter(away.pieces.values())).untyped_storage().resize_(0)
        with pytest.raises(MemoryStateError):
            manager.save(2, {"one": away})


def test_nothing_can_be_computed_with_pieces() -> None:
    with pytest.raises(TypeError, match="for checkpoints only"):
        cut(WHOLE, RUNS).clone()


def test_no_copy_of_a_piece_has_a_gradient_function(tmp_path: Path) -> None:
    staging = StagingMemory(BACKEND, SaveTuning(), on_device=False)
    pieces = cut(WHOLE, RUNS)
    for piece in pieces.pieces.values():
        piece.requires_grad_()
    captured = CapturedState({"one": pieces}, staging, copy=True, offloader=None)
    assert len(captured.on_host) == len(RUNS)
    assert not any(copy.requires_grad for copy in captured.on_host.values())
    captured.close()
    staging.close()
    with CheckpointManager(tmp_path, async_save=True, backend=BACKEND) as manager:
        manager.save(1, {"one": pieces})
        plain = {"one": torch.zeros(4, 10)}
        manager.resume(plain)
    assert torch.equal(plain["one"], WHOLE)


def test_an_empty_piece_does_not_replace_a_part_with_the_same_offset(tmp_path: Path) -> None:
    values = torch.arange(8.0)
    state = {"one": LocalShards((8,), torch.float32, {(0,): values, (4,): torch.empty(0)})}
    tuning = SaveTuning(max_item_nbytes=16)  # [0, 4), [4, 8)
    with CheckpointManager(tmp_path, backend=BACKEND, tuning=tuning) as manager:
        manager.save(1, state)
        plain, none = {"one": torch.zeros(8)}, {"empty": LocalShards((0, 3), torch.float32, {})}
        manager.resume(plain)
        manager.save(2, none)
        assert manager.resume(none) is not None, "a tensor without elements is saved"
    assert torch.equal(plain["one"], values)
