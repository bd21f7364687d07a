"""Turn conversations into tokens with the model's chat template, and keep the policy's own tokens as they are."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hwrl.errors import DataError, message_of
from hwrl.interfaces import Ints, ParsedAnswer, Response, ToolCall, ToolParser, Tools
from hwrl.rollout.tool_calls import parse_tool_calls

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id``."""
_MARK = "THE POLICY SAID THIS"
"""Stands for the policy's message in a rendered text, so that its end can be found."""


class ChatTokens:
    """Turns conversations into tokens, and the policy's tokens into messages, with ``tokenizer`` and its chat template.

    A conversation is the tokens of :meth:`prompt`, then the policy's tokens, then the tokens of :meth:`following`, then
    again the policy's, and so on. The policy's tokens are never encoded from text. A template may change earlier
    messages of the policy, and drop their reasoning, for example; here the policy's tokens stay.

    The tokens ``end_ids`` end a response. ``parse_tools`` reads the tool calls in the policy's text. ``options`` are
    the run's options for the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Collection[int],
        parse_tools: ToolParser = parse_tool_calls,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._end_ids, self._parse_tools, self._options = frozenset(end_ids), parse_tools, dict(options or {})

    def prompt(self, messages: Conversation, *, tools: Tools = (), options: Mapping[str, Any] | None = None) -> Ints:
        """Return the tokens of ``messages`` and of the start of the policy's answer (int32).

        ``options`` are added to the run's. Raises DataError if the template refuses the messages, or for an option that
        is an argument of the tokenizer's ``apply_chat_template``, such as another template.
        """
        return self.encode(self._render(messages, tools, options, answer_follows=True))

    def following(
        self,
        messages: Conversation,
        *,
        at: int,
        said: Ints,
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> Ints:
        """Return the tokens between the policy's message ``messages[at]`` and the start of its next answer (int32).

        ``said`` are the policy's own tokens of that message. If a limit or a stop text ended them, they lack an end
        token; then the template's end is added. Raises DataError if the template refuses the messages, or if the end of
        the policy's message cannot be found in its text.
        """
        return self.after(said, self._tail(messages, at, tools, options))

    def after(self, said: Ints, tail: Ints) -> Ints:
        """Return ``tail``, the tokens after the policy's text, as it continues ``said``.

        ``tail`` may begin with the end of the policy's turn. That is left out if ``said`` has an end token.
        """
        ends = self._ends(tail)
        if not len(said) or int(said[-1]) not in self._end_ids or not len(ends):
            return tail
        only_space = not self.decode(tail[: ends[0]], special=True).strip()
        return tail[ends[0] + 1 :] if only_space else tail

    def read(self, response: Response, *, tools: Tools = ()) -> ParsedAnswer:
        """Return the policy's message, without the response's end token and stop text.

        With ``tools`` its tool calls are read; then the text keeps special tokens, because a parser may need them. A
        lone surrogate in a call, which no UTF-8 can hold, is a question mark.
        """
        if not tools:
            return ParsedAnswer(self.text(response))
        answer = self._parse_tools(self.text(response, special=True), tools)
        calls = tuple(ToolCall(_encodable(call.name), _encodable(call.arguments)) for call in answer.tool_calls)
        return ParsedAnswer(_encodable(answer.content), calls)

    def text(self, response: Response, *, special: bool = False) -> str:
        """Return the text of ``response`` without its end token and stop text. ``special`` keeps special tokens."""
        ids = response.token_ids
        if not response.truncated and len(ids) and int(ids[-1]) in {*self._end_ids, response.stop}:
            ids = ids[:-1]
        text = self.decode(ids, special=special)
        # The first place: the last token may hold the stop text several times, as three newlines hold two twice.
        if isinstance(response.stop, str) and (start := text.find(response.stop)) >= 0:
            text = text[:start]
        return text

    def encode(self, text: str) -> Ints:
        """Return the tokens of ``text`` (int32); no special tokens are added. A lone surrogate is a question mark."""
        return np.array(self.tokenizer(_encodable(text), add_special_tokens=False)["input_ids"], dtype=np.int32)

    def decode(self, token_ids: Ints, *, special: bool) -> str:
        """Return the text of ``token_ids``; ``special`` keeps special tokens."""
        text = self.tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise DataError for an option that is no variable of the template but changes how it is applied."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"documents"}
        if reserved := sorted(own & options.keys()):
            raise DataError(
                f"the option {reserved[0]!r} of the chat template cannot be set",
                why="hwrl sets it, or the run's template would be another",
                fix="leave it out",
            )

    def _tail(self, messages: Conversation, at: int, tools: Tools, options: Mapping[str, Any] | None) -> Ints:
        """Return the template's tokens after the policy's text in ``messages[at]``, the end of its turn included.

        To find the place, the message is rendered as a mark without tool calls. A template may refuse tool results
        after a message without calls; then :meth:`_tail_after_calls` finds the place.
        """
        before, after = messages[:at], messages[at + 1 :]
        mark = _MARK
        while mark in repr((messages, tools)):
            mark += "!"
        try:
            text = self._render([*before, {"role": "assistant", "content": mark}, *after], tools, options)
        except DataError:
            if not messages[at].get("tool_calls"):
                raise
            text = ""
        parts = text.split(mark)
        if len(parts) == 2:
            return self.encode(parts[1])
        return self._tail_after_calls(messages, at, tools, options)

    def _tail_after_calls(
        self, messages: Conversation, at: int, tools: Tools, options: Mapping[str, Any] | None
    ) -> Ints:
        """Return the tokens as :meth:`_tail` does: those from the last end token of the messages up to ``at`` on."""
        whole = self._render(messages, tools, options)
        begun = self._render(messages[: at + 1], tools, options, answer_follows=False)
        if not whole.startswith(begun):
            raise DataError(
                "the chat template does not say where a message of the policy ends",
                why=f"with later messages, its text for the messages up to message {at + 1} changes",
                fix="use a chat template that leaves earlier messages as they are; or write a workflow with its own",
            )
        ids, ends = self.encode(whole), self._ends(self.encode(begun))
        return ids[self._ends(ids)[len(ends) - 1] :] if len(ends) else self.encode(whole[len(begun) :])

    def _ends(self, ids: Ints) -> Ints:
        """Return the places of end tokens in ``ids``."""
        return np.isin(ids, sorted(self._end_ids)).nonzero()[0].astype(np.int32)

    def _render(
        self,
        messages: Conversation,
        tools: Tools,
        options: Mapping[str, Any] | None,
        *,
        answer_follows: bool = True,
    ) -> str:
        if options:
            self._check_options(options)
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=answer_follows,
                **{**self._options, **(options or {})},
            )
        except Exception as exc:  # a template may raise anything, and refuses roles by raising
            raise DataError(
                "the chat template refuses the conversation",
                why=message_of(exc),
                fix="send messages that the model's chat template knows; a model without one needs completions",
            ) from exc
        return str(text)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` in the form for chat templates: its content is one text, arguments of calls are objects."""
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = content_text(found.get("content"))
    if found.get("role") == "developer":  # OpenAI's new name; templates know the old one
        found["role"] = "system"
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return found


def _encodable(text: str) -> str:
    """Return ``text`` with a question mark for each lone surrogate: neither tokenizers nor UTF-8 have those."""
    return text.encode("utf-8", "replace").decode()


def content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return a message's content as one text, with a line for each part."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part["text"]) for part in content)


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": arguments_object(function.get("arguments"))}


def arguments_object(arguments: Any) -> Any:
    """Return a call's ``arguments`` as an object. Text stays text if it is not JSON."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
