"""A request and its generated tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hwrl.interfaces import GenerationRequest, Response
from hwrl_vllm.scheduler import NewTokens


@dataclasses.dataclass
class PartialResponse:
    """A request, its form for vLLM's engine core, and its tokens until now."""

    request: GenerationRequest
    core_request: Any
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    _spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def take(self, new: NewTokens) -> None:
        """Append ``new`` tokens."""
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs

    def mark(self, version: int) -> None:
        """Record that the tokens since the last call come from ``version``."""
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
            truncated=self.token_ids[-1] not in eos_ids,
        )
