"""What the policy said through one endpoint: turns, which form trees of conversations, and their trajectories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwrl.interfaces import Ints, ParsedAnswer, Response, Segment, Tools, Trajectory
from hwrl.rollout.chat import Conversation, arguments_object, content_text


@dataclass(frozen=True, eq=False)
class Turn:
    """A response of the policy to the tokens of the turn ``before``, if any, followed by ``context_ids`` (int32)."""

    before: Turn | None
    context_ids: Ints
    response: Response

    @property
    def token_ids(self) -> Ints:
        """All tokens of the conversation, this response included."""
        own = (self.context_ids, self.response.token_ids)
        return np.concatenate(own if self.before is None else (self.before.token_ids, *own))

    def path(self) -> list[Turn]:
        """Return the turns of the conversation up to this one."""
        return [*(self.before.path() if self.before else ()), self]


class Conversations:
    """The recorded turns, each found again by a key: what an agent repeats before it goes on."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._by_key: dict[Hashable, Turn] = {}

    def find(self, key: Hashable) -> Turn | None:
        """Return the newest turn with ``key``, or None."""
        return self._by_key.get(key)

    def record(self, turn: Turn, *, key: Hashable) -> None:
        """Keep ``turn``."""
        self._turns.append(turn)
        self._by_key[key] = turn

    def start_of_ids(self, token_ids: Ints) -> Turn | None:
        """Return the longest conversation at the start of ``token_ids``, or None."""
        found = [turn for turn in self._turns if _starts(token_ids, turn.token_ids)]
        return max(found, key=lambda turn: len(turn.token_ids), default=None)

    def start_of_text(self, text: str) -> tuple[Turn | None, str]:
        """Return the longest conversation at the start of ``text``, recorded with its text as its key, and the rest."""
        keys = [key for key in self._by_key if isinstance(key, str) and text.startswith(key)]
        key = max(keys, key=len, default="")
        return self._by_key.get(key), text[len(key) :]

    def trajectories(self) -> list[Trajectory]:
        """Return a trajectory for each conversation that nothing continues, in order.

        Where conversations part, the tokens before belong to the policy in the first one only: each token of the policy
        is trained once.
        """
        continued = {turn.before for turn in self._turns}
        told: set[Turn] = set()
        return [_trajectory(turn, told) for turn in self._turns if turn not in continued]


def _starts(token_ids: Ints, with_ids: Ints) -> bool:
    return len(with_ids) <= len(token_ids) and bool((token_ids[: len(with_ids)] == with_ids).all())


def _trajectory(last: Turn, told: set[Turn]) -> Trajectory:
    segments: list[Segment] = []
    context: list[Ints] = []
    for turn in last.path():
        context.append(turn.context_ids)
        if turn in told:
            context.append(turn.response.token_ids)
            continue
        told.add(turn)
        ids = np.concatenate(context)
        context = []
        if len(ids):
            segments.append(Segment(ids))
        segments.append(Segment.of_response(turn.response))
    return Trajectory(tuple(segments), truncated=last.response.truncated)


# -- keys of conversations in messages -------------------------------------------------------------------------------


def chat_keys(messages: Conversation, *, tools: Tools, options: Mapping[str, Any]) -> list[bytes]:
    """Return a key for each start of ``messages``: element n is that of n messages, after ``tools`` and ``options``.

    Two conversations have one key if their messages say the same: identifiers of calls, the order in JSON, and white
    space around the policy's text do not count.
    """
    digest = hashlib.sha256(_json([list(tools), dict(options)]))
    keys = [digest.digest()]
    for message in messages:
        digest.update(_json(_meaning(message)))
        keys.append(digest.digest())
    return keys


def said_message(answer: ParsedAnswer) -> dict[str, Any]:
    """Return ``answer`` as a message."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def _meaning(message: Mapping[str, Any]) -> Sequence[Any]:
    role, text = message.get("role"), content_text(message.get("content"))
    if role != "assistant":
        return [role, text, message.get("name")]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [role, text.strip(), [[one.get("name"), arguments_object(one.get("arguments"))] for one in functions]]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"
