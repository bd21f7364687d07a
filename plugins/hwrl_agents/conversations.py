"""The record of one endpoint: the policy's turns, and the trajectories that they form.

A turn may follow an earlier one. Two turns may follow the same one, so the turns form trees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwrl.interfaces import Ints, ParsedAnswer, Response, Segment, Tools, Trajectory
from hwrl.rollout import Conversation, arguments_object, content_text


@dataclass(frozen=True, eq=False)
class Turn:
    """A response of the policy to the conversation up to ``before``, if any, and then ``context_ids`` (int32).

    ``answer`` is its message for the agent.
    """

    before: Turn | None
    context_ids: Ints
    response: Response
    answer: ParsedAnswer

    @property
    def token_ids(self) -> Ints:
        """All tokens of the conversation, this response included."""
        return np.concatenate([ids for turn in self.path() for ids in (turn.context_ids, turn.response.token_ids)])

    def path(self) -> list[Turn]:
        """Return the turns of the conversation up to this one, the first one first."""
        turns = [self]
        while (before := turns[-1].before) is not None:
            turns.append(before)
        return turns[::-1]


class Conversations:
    """The recorded turns. Agents repeat a conversation to continue it, so its content is the key of its last turn."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._by_key: dict[Hashable, Turn] = {}

    def find(self, key: Hashable) -> Turn | None:
        """Return the newest turn with ``key``; None if there is none."""
        return self._by_key.get(key)

    def record(self, turn: Turn, *, key: Hashable) -> None:
        """Keep ``turn``, and let ``key`` find it."""
        self._turns.append(turn)
        self._by_key[key] = turn

    def prefix_of_ids(self, token_ids: Ints) -> Turn | None:
        """Return the last turn of the longest conversation that is a prefix of ``token_ids``; None if none is."""
        found = [turn for turn in self._turns if _begins(token_ids, turn.token_ids)]
        return max(found, key=lambda turn: len(turn.token_ids), default=None)

    def prefix_of_text(self, text: str) -> tuple[Turn | None, str]:
        """Return the last turn of the longest conversation that is a prefix of ``text``, and the rest of ``text``.

        Only turns with a text as their key count. Without one, return None and all of ``text``.
        """
        keys = [key for key in self._by_key if isinstance(key, str) and text.startswith(key)]
        key = max(keys, key=len, default="")
        return self._by_key.get(key), text[len(key) :]

    def trajectories(self) -> list[Trajectory]:
        """Return a trajectory for each turn that no other turn follows, in the order of recording.

        Two trajectories may begin with the same turns. Then these are the policy's in the first trajectory, and context
        in the second. So each token of the policy is trained once.
        """
        continued = {turn.before for turn in self._turns}
        trained: set[Turn] = set()
        return [_trajectory(turn, trained) for turn in self._turns if turn not in continued]


def _begins(token_ids: Ints, with_ids: Ints) -> bool:
    return len(with_ids) <= len(token_ids) and bool((token_ids[: len(with_ids)] == with_ids).all())


def _trajectory(last: Turn, trained: set[Turn]) -> Trajectory:
    """Return the trajectory that ends with ``last``. Turns in ``trained`` are context; the others join it."""
    segments: list[Segment] = []
    context: list[Ints] = []
    for turn in last.path():
        context.append(turn.context_ids)
        if turn in trained:
            context.append(turn.response.token_ids)
            continue
        trained.add(turn)
        ids = np.concatenate(context)
        context = []
        if len(ids):
            segments.append(Segment(ids))
        segments.append(Segment.of_response(turn.response))
    return Trajectory(tuple(segments), truncated=last.response.truncated)


# -- keys of conversations in messages -------------------------------------------------------------------------------


def chat_keys(messages: Conversation, *, tools: Tools, options: Mapping[str, Any]) -> list[bytes]:
    """Return a key for each prefix of ``messages``: element n is the key of the first n messages.

    ``tools`` and ``options`` are part of each key. Conversations with the same meaning have the same key: the ids of
    calls, the order of keys in JSON, and white space around the policy's text do not count.
    """
    digest = hashlib.sha256(_json([list(tools), dict(options)]))
    keys = [digest.digest()]
    for message in messages:
        digest.update(_json(_meaning(message)))
        keys.append(digest.digest())
    return keys


def said_message(answer: ParsedAnswer) -> dict[str, Any]:
    """Return ``answer`` as a message in OpenAI's form, without ids of calls."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def _meaning(message: Mapping[str, Any]) -> Sequence[Any]:
    role, text = message.get("role"), content_text(message.get("content"))
    if role != "assistant":
        return [role, text, message.get("name")]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [role, text.strip(), [[one.get("name"), _meaning_of_arguments(one.get("arguments"))] for one in functions]]


def _meaning_of_arguments(arguments: Any) -> str:
    try:
        return json.dumps(arguments_object(arguments), sort_keys=True)
    except (ValueError, RecursionError):  # what can just be read may be too deep to be written
        return str(arguments)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"
