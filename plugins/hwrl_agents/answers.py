"""The answers of an endpoint in OpenAI's form: one object, or the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from hwrl.rollout import ChatTokens
from hwrl_agents.conversations import Turn
from hwrl_agents.requests import ChatRequest, CompletionRequest

_AnswerJson = dict[str, Any]


class AnswerFormat:
    """Writes the answers to one request as JSON. All ``choices`` have the same prompt."""

    kind: str
    """The value of ``object`` in an answer."""
    chunk_kind: str
    """The value of ``object`` in a chunk."""
    prefix: str
    """The beginning of the answer's ``id``."""

    def __init__(self, asked: ChatRequest | CompletionRequest, choices: Sequence[Turn], chat: ChatTokens) -> None:
        self.choices, self.chat = choices, chat
        self._asked = asked
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
        self._with_ids = asked.return_token_ids

    def whole(self) -> _AnswerJson:
        """Return the answer as one object."""
        choices = [{**self.of_choice(choice, index), **self._ids(choice)} for index, choice in enumerate(self.choices)]
        return {**self._head, "object": self.kind, **self._prompt_ids(), "choices": choices, "usage": self._usage()}

    def chunks(self) -> Iterator[_AnswerJson]:
        """Yield the chunks of a stream with content; :meth:`last_chunks` follow."""
        for index, choice in enumerate(self.choices):
            for number, part in enumerate(self.parts_of_choice(choice)):
                extra = {} if number else self._ids(choice)
                yield self._chunk([{"index": index, "finish_reason": None, **part, **extra}])

    def last_chunks(self) -> Iterator[_AnswerJson]:
        """Yield a chunk with the finish reason of each choice, and one with the usage if the request wants it."""
        for index, choice in enumerate(self.choices):
            yield self._chunk([{"index": index, **self.empty_part(), "finish_reason": _finish_reason(choice)}])
        if self._asked.stream_options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def of_choice(self, choice: Turn, index: int) -> _AnswerJson:
        """Return ``choice`` as a part of the whole answer."""
        raise NotImplementedError

    def parts_of_choice(self, choice: Turn) -> Iterator[_AnswerJson]:
        """Yield ``choice`` as parts of a stream."""
        raise NotImplementedError

    def empty_part(self) -> _AnswerJson:
        """Return a part without text."""
        raise NotImplementedError

    def token_texts(self, choice: Turn) -> list[str]:
        """Return the text of each token of ``choice``, decoded alone."""
        ids = choice.response.token_ids
        return [self.chat.decode(ids[index : index + 1], special=True) for index in range(len(ids))]

    def _chunk(self, choices: list[_AnswerJson]) -> _AnswerJson:
        return {**self._head, "object": self.chunk_kind, **self._prompt_ids(), "choices": choices}

    def _ids(self, choice: Turn) -> _AnswerJson:
        return {"token_ids": choice.response.token_ids.tolist()} if self._with_ids else {}

    def _prompt_ids(self) -> _AnswerJson:
        return {"prompt_token_ids": self._prompt().tolist()} if self._with_ids else {}

    def _prompt(self) -> Any:
        turn = self.choices[0]
        return turn.token_ids[: -len(turn.response.token_ids)]

    def _usage(self) -> _AnswerJson:
        prompt, said = len(self._prompt()), sum(len(choice.response.token_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


class ChatFormat(AnswerFormat):
    """Answers of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def of_choice(self, choice: Turn, index: int) -> _AnswerJson:
        """Return ``choice`` as a part of the whole answer."""
        calls = _tool_calls(choice)
        content = choice.answer.content
        message: _AnswerJson = {"role": "assistant", "content": (content or None) if calls else content}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": _finish_reason(choice),
        }

    def parts_of_choice(self, choice: Turn) -> Iterator[_AnswerJson]:
        """Yield ``choice`` as parts of a stream."""
        delta = {"role": "assistant", "content": choice.answer.content}
        yield {"delta": delta, "logprobs": self._logprobs(choice)}
        if calls := _tool_calls(choice):
            yield {"delta": {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}}

    def empty_part(self) -> _AnswerJson:
        """Return a part without text."""
        return {"delta": {}}

    def _logprobs(self, choice: Turn) -> _AnswerJson | None:
        assert isinstance(self._asked, ChatRequest)
        if not self._asked.logprobs:
            return None
        rows = []
        for text, logprob in zip(self.token_texts(choice), choice.response.logprobs.tolist(), strict=True):
            row = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            rows.append({**row, "top_logprobs": [row] if self._asked.top_logprobs else []})
        return {"content": rows}


class CompletionFormat(AnswerFormat):
    """Answers of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def of_choice(self, choice: Turn, index: int) -> _AnswerJson:
        """Return ``choice`` as a part of the whole answer."""
        (part,) = self.parts_of_choice(choice)
        return {"index": index, **part, "finish_reason": _finish_reason(choice)}

    def parts_of_choice(self, choice: Turn) -> Iterator[_AnswerJson]:
        """Yield ``choice`` as parts of a stream."""
        yield {"text": choice.answer.content, "logprobs": self._logprobs(choice)}

    def empty_part(self) -> _AnswerJson:
        """Return a part without text."""
        return {"text": "", "logprobs": None}

    def _logprobs(self, choice: Turn) -> _AnswerJson | None:
        assert isinstance(self._asked, CompletionRequest)
        if self._asked.logprobs is None:
            return None
        texts, logprobs = self.token_texts(choice), choice.response.logprobs.tolist()
        offsets = [0, *accumulate(len(text) for text in texts)][: len(texts)]
        top = [{text: value} for text, value in zip(texts, logprobs, strict=True)] if self._asked.logprobs else None
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _finish_reason(choice: Turn) -> str:
    """Return OpenAI's word for the reason why the response ended."""
    if choice.response.truncated:
        return "length"
    return "tool_calls" if choice.answer.tool_calls else "stop"


def _tool_calls(choice: Turn) -> list[_AnswerJson]:
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in choice.answer.tool_calls
    ]
