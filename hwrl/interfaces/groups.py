"""The unit of data between rollout and training: one prompt with its ``n`` responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int32]"
Floats: TypeAlias = "npt.NDArray[np.float32]"


@dataclass(frozen=True)
class Response:
    """One generated response: each token's id, log-probability under the behaviour policy, and weight version.

    The three arrays have one element per generated token, including the end-of-sequence token. ``truncated`` is true
    if the length limit ended the response. ``stop`` is the stop text or the stop token (``Sampling``) at its end; None
    after another end.
    """

    token_ids: Ints
    logprobs: Floats
    versions: Ints
    truncated: bool
    stop: str | int | None = None

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError("a response needs one log-probability and one version for each token")


@dataclass(frozen=True)
class PromptGroup:
    """A prompt's responses with their rewards, ready for training.

    ``sequence_number`` is the prompt's place in the stream. ``lease_id`` is the lease of the rollout
    (:mod:`hwrl.rollout`). ``incarnation`` is the life of the trainer behind all of its weights: after a restart from a
    checkpoint, versions count from there again. The arrays concatenate all responses; ``lengths`` (int32, one per
    response) separates them.
    """

    sequence_number: int
    lease_id: int
    incarnation: int
    prompt_ids: Ints
    token_ids: Ints
    logprobs: Floats
    versions: Ints
    lengths: Ints
    rewards: Floats
    truncated: npt.NDArray[np.bool_]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of responses."""
        return len(self.lengths)

    @property
    def oldest_version(self) -> int:
        """The smallest weight version among all tokens."""
        return int(self.versions.min())

    @property
    def newest_version(self) -> int:
        """The largest weight version among all tokens."""
        return int(self.versions.max())

    def responses(self) -> list[slice]:
        """Return, for each response, its slice of ``token_ids``, ``logprobs`` and ``versions``."""
        lengths = [int(length) for length in self.lengths]
        return [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]

    @classmethod
    def join(
        cls,
        responses: Sequence[Response],
        *,
        sequence_number: int,
        lease_id: int,
        incarnation: int,
        prompt_ids: Ints,
        rewards: Sequence[float],
        metrics: dict[str, float],
    ) -> PromptGroup:
        """Return the group of ``responses`` to one prompt; ``rewards`` has one number per response."""
        import numpy as np

        return cls(
            sequence_number=sequence_number,
            lease_id=lease_id,
            incarnation=incarnation,
            prompt_ids=prompt_ids,
            token_ids=np.concatenate([response.token_ids for response in responses]),
            logprobs=np.concatenate([response.logprobs for response in responses]),
            versions=np.concatenate([response.versions for response in responses]),
            lengths=np.array([len(response.token_ids) for response in responses], dtype=np.int32),
            rewards=np.array(rewards, dtype=np.float32),
            truncated=np.array([response.truncated for response in responses]),
            metrics=metrics,
        )
