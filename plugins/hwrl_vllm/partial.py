"""A request in progress, and its tokens so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hwrl.interfaces import GenerationRequest, Response
from hwrl.rollout import StopFinder
from hwrl_vllm.scheduler import NewTokens


@dataclasses.dataclass
class PartialResponse:
    """A request, the same request as vLLM's ``EngineCoreRequest``, and its tokens so far.

    ``stops`` finds the stops in the tokens; None if the request has no stops.
    """

    request: GenerationRequest
    core_request: Any
    stops: StopFinder | None = None
    stop: str | int | None = None
    """The stop that ended the response, a text or a token id; None if there is none."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    _spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Numbers of consecutive tokens, each with the weight version that they come from."""

    def take(self, new: NewTokens) -> None:
        """Append ``new`` tokens up to the first stop, and set :attr:`stop` to that one."""
        count = len(new.token_ids)
        if self.stops is not None:
            count = self._count_to_stop(self.stops, new.token_ids)
        self.token_ids += new.token_ids[:count]
        self.logprobs += new.logprobs[:count]

    def _count_to_stop(self, stops: StopFinder, token_ids: Sequence[int]) -> int:
        """Return how many of ``token_ids`` belong to the response. Set :attr:`stop` if the last one completes one."""
        for count, token_id in enumerate(token_ids, start=1):
            self.stop = stops.find(token_id)
            if self.stop is not None:
                return count
        return len(token_ids)

    def mark(self, version: int) -> None:
        """Record that the tokens since the last call come from ``version``; there may be none."""
        marked = sum(count for count, _ in self._spans)
        self._spans.append((len(self.token_ids) - marked, version))

    def response(self, *, version: int, eos_ids: Sequence[int]) -> Response:
        """Return the finished response; its last tokens come from ``version``."""
        self.mark(version)
        counts, versions = zip(*self._spans, strict=True)
        return Response(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.repeat(np.array(versions, dtype=np.int32), counts),
            truncated=self.stop is None and self.token_ids[-1] not in eos_ids,
            stop=self.stop,
        )
