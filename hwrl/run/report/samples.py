"""Write a few trajectories of each training step as text to ``samples.jsonl``, one line per trajectory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.files import open_to_append
from hwrl.run.report.records import read_lines

if TYPE_CHECKING:
    from hwrl.interfaces import Ints, PromptGroup

SAMPLES = "samples.jsonl"
MAX_CHARS = 16_384
"""The maximum length of a text. A longer one is cut in the middle."""

Sample = dict[str, Any]
"""One line of the file. docs/report.md describes its keys."""


def pick_samples(
    groups: Sequence[PromptGroup], *, step: int, version: int, count: int, decode: Callable[[Ints], str]
) -> list[Sample]:
    """Return ``count`` trajectories of a step's ``groups`` as text, chosen at random with the step as seed.

    They come from different prompts, unless there are fewer than ``count`` prompts. ``version`` is the trainer's
    version before the step; ages are relative to it. ``decode`` turns token ids into text.
    """
    chosen = islice(_places([group.size for group in groups], random.Random(step)), count)
    return [_sample(groups[index], row, step=step, version=version, decode=decode) for index, row in chosen]


def _places(sizes: Sequence[int], chance: random.Random) -> Iterator[tuple[int, int]]:
    """Yield all rows as (group, row), in random order: first one row of each group, then a second one, and so on."""
    order = chance.sample(range(len(sizes)), len(sizes))
    rows: dict[int, list[int]] = {}
    for turn in range(max(sizes, default=0)):
        for index in order:
            if index not in rows:
                rows[index] = chance.sample(range(sizes[index]), sizes[index])
            if turn < sizes[index]:
                yield index, rows[index][turn]


def drop_samples_after(path: Path, *, last_step: int) -> None:
    """Truncate the file after the samples of ``last_step``. This also removes an incomplete last line."""
    kept = 0
    for end, sample in read_lines(path):
        if sample is not None and sample["step"] > last_step:
            break
        if sample is not None:
            kept = end
    if path.exists() and kept < path.stat().st_size:
        with open_to_append(path) as file:
            file.truncate(kept)


def _sample(group: PromptGroup, row: int, *, step: int, version: int, decode: Callable[[Ints], str]) -> Sample:
    span = group.responses()[row]
    versions = group.versions[span][group.loss_mask[span]]
    return {
        "step": step,
        "sequence_number": group.sequence_number,
        "sample": int(group.samples[row]),
        "reward": float(group.rewards[row]),
        "truncated": bool(group.truncated[row]),
        "age_max": version - int(versions.min()),
        "age_min": version - int(versions.max()),
        "prompt_reward_mean": float(group.rewards.mean()),
        "prompt_metrics": group.metrics,
        "prompt": _shortened(decode(group.prompt_ids)),
        "prompt_tokens": len(group.prompt_ids),
        "segments": list(_segments(group, span, decode)),
    }


def _segments(group: PromptGroup, span: slice, decode: Callable[[Ints], str]) -> Iterator[Sample]:
    """Yield the segments of a row in order. A segment has one author: the policy or the environment."""
    start = span.start
    for by_policy, tokens in groupby(group.loss_mask[span].tolist()):
        end = start + len(list(tokens))
        segment = {"author": "policy" if by_policy else "environment", "tokens": end - start}
        if by_policy and group.token_rewards is not None:
            segment["reward"] = float(group.token_rewards[start:end].sum())
        yield {**segment, "text": _shortened(decode(group.token_ids[start:end]))}
        start = end


def _shortened(text: str) -> str:
    left_out = len(text) - MAX_CHARS
    if left_out <= 0:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}"
