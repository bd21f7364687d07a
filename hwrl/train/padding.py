"""Make padded rows, a training batch, from prompt groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hwrl.interfaces import Batch, PromptGroup


def collate(groups: Sequence[PromptGroup], *, advantages: torch.Tensor) -> Batch:
    """Return the batch of all responses of ``groups``, in order. ``advantages`` has one number for each response."""
    rows = sum(group.size for group in groups)
    length = max(len(group.prompt_ids) + int(group.lengths.max()) for group in groups)
    tokens = np.zeros((rows, length), dtype=np.int64)
    mask = np.zeros((rows, length), dtype=bool)
    logprobs = np.zeros((rows, length), dtype=np.float32)
    row = 0
    for group in groups:
        prompt = len(group.prompt_ids)
        for span in group.responses():
            end = prompt + span.stop - span.start
            tokens[row, :prompt] = group.prompt_ids
            tokens[row, prompt:end] = group.token_ids[span]
            logprobs[row, prompt:end] = group.logprobs[span]
            mask[row, prompt:end] = True
            row += 1
    return Batch(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(logprobs), advantages)
