"""Training batches: their rows, and parts of them."""

from __future__ import annotations

import torch

from hwrl.interfaces import Batch


def test_rows_without_a_token_to_train_can_be_selected_and_divided() -> None:
    """A mini-batch may hold truncated rows only, and a run may leave those out."""
    mask = torch.tensor([[False] * 4, [False] * 4, [False, True, True, False]])
    batch = Batch(torch.ones(3, 4, dtype=torch.int64), mask, torch.zeros(3, 4), torch.zeros(3))
    for rows in ([0, 1], []):
        part = batch.select(torch.tensor(rows, dtype=torch.int64))
        assert part.lengths().tolist() == [0] * len(rows)
        assert list(part.micro_batches(max_tokens=8)) == []
    assert batch.select(torch.tensor([0, 2])).tokens.shape == (2, 3)
