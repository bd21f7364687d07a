"""Groups of single-turn responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hwrl.interfaces import Ints, PromptGroup, Response, Trajectory


def join_responses(responses: Sequence[Response], *, prompt_ids: Ints, **fields: Any) -> PromptGroup:
    """Return the group of ``responses`` to one prompt, each a sample of its own."""
    return PromptGroup.of_samples([(Trajectory.single_turn(prompt_ids, one),) for one in responses], **fields)
