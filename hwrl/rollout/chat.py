"""Turn conversations into tokens with the model's chat template, and keep the policy's own tokens as they are."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from hwrl.errors import DataError, message_of
from hwrl.interfaces import Ints, ParsedAnswer, Response, ToolCall, ToolParser, Tools
from hwrl.rollout.call_threads import CallThreads
from hwrl.rollout.tool_calls import parse_tool_calls

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id``."""
_MARK = "THE POLICY SAID THIS"
"""Stands for the policy's message in a rendered text, so that its end can be found. Random digits follow it."""
_SHORT = 1 << 14
"""Texts of up to this many characters are encoded in the event loop, within milliseconds."""
_LEAST_PER_TOKEN = 16
"""Counts as the characters of a vocabulary's longest token if that is shorter, since white space may have no token."""
_Worked = TypeVar("_Worked")


class TooLongError(DataError):
    """A text has so many characters that its tokens cannot fit. It was not encoded."""


TooLongError.code = DataError.code


class ChatTokens:
    """Turns conversations into tokens, and the policy's tokens into messages, with ``tokenizer`` and its chat template.

    A conversation is the tokens of :meth:`prompt`, then the policy's tokens, then the tokens of :meth:`following`, then
    again the policy's, and so on. The policy's tokens are never encoded from text. A template may change earlier
    messages of the policy, and drop their reasoning, for example; here the policy's tokens stay.

    The tokens ``end_ids`` end a response. ``parse_tools`` reads the tool calls in the policy's text. A text that cannot
    have ``max_length`` tokens or fewer, by its characters alone, is refused before it is encoded (TooLongError, a
    DataError): the longest token of the vocabulary says how many characters a token may have.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Collection[int],
        parse_tools: ToolParser = parse_tool_calls,
        max_length: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._end_ids, self._parse_tools, self._max_length = frozenset(end_ids), parse_tools, max_length
        self._most_characters: int | None = None  # found when it is needed
        self._adds_space: bool | None = None  # likewise
        self._thread = CallThreads(1, "chat-tokens")
        self._copy: ChatTokens | None = None

    async def off_loop(self, work: Callable[[ChatTokens], _Worked], *, characters: int) -> _Worked:
        """Return ``work(chat)`` for a text of ``characters``. A long one has a thread: it would block the event loop.

        There ``chat`` has a copy of the tokenizer, because a tokenizer cannot be set up and used at the same time.
        """
        if characters <= _SHORT:
            return work(self)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._own_copy()))

    def _own_copy(self) -> ChatTokens:
        if self._copy is None:
            twin = copy.copy(self)
            twin.tokenizer = copy.deepcopy(self.tokenizer)
            self._copy = twin
        return self._copy

    def encode_prompt(self, prompt: str | Conversation, *, tools: Tools | str | None = None) -> tuple[str, Ints]:
        """Return the model's input for a row's ``prompt``, as text and as token ids.

        The tokenizer adds its special tokens to a string, but no end: the policy goes on. Messages are as for
        :meth:`prompt`. ``tools`` are JSON schemas, or the JSON text of their list; a string has no place for them.
        Raises ValueError for other ``tools``.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens=True)
            if ids[-1:].tolist() == [self.tokenizer.eos_token_id]:
                own = self._encode(prompt)
                ids = ids[:-1] if np.array_equal(ids[-1 - len(own) : -1], own) else ids
            return prompt, ids
        text = self._render(prompt, _schemas(tools), None)
        return text, self._encode(text)

    def prompt(self, messages: Conversation, *, tools: Tools = (), options: Mapping[str, Any] | None = None) -> Ints:
        """Return the tokens of ``messages`` and of the start of the policy's answer (int32).

        ``options`` go to the template. Raises DataError if the template refuses the messages, or for an option that
        is an argument of the tokenizer's ``apply_chat_template``, such as another template.
        """
        return self._encode(self._render(messages, tools, options))

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
        """Return the tokens of ``text`` as it continues a conversation (int32).

        Nothing is added to it: no special tokens, and no space that some tokenizers write before a text. A lone
        surrogate is a question mark. Raises TooLongError, a DataError.
        """
        if self._adds_space is None:
            self._adds_space = self._after_line_end("a") not in ([], self._encode("a").tolist())
        after = self._after_line_end(text) if self._adds_space else []
        return np.array(after, dtype=np.int32) if after else self._encode(text)

    def _after_line_end(self, text: str) -> list[int]:
        """Return the tokens of ``text`` behind the end of a line; an empty list if a token covers both."""
        before, whole = self._encode("\n").tolist(), self._encode(f"\n{text}").tolist()
        return whole[len(before) :] if whole[: len(before)] == before else []

    def _encode(self, text: str, **options: Any) -> Ints:
        self._check_length(text)
        if getattr(self.tokenizer, "split_special_tokens", False):  # the template's own would be split, too
            options["split_special_tokens"] = False
        given = {"add_special_tokens": False, **options}
        return np.array(self.tokenizer(_encodable(text), **given)["input_ids"], dtype=np.int32)

    def _check_length(self, text: str) -> None:
        """Raise TooLongError for a text with more characters than ``max_length`` tokens can have."""
        if self._max_length is None or len(text) <= self._max_length:
            return
        if self._most_characters is None:
            longest = max(map(len, self.tokenizer.get_vocab()), default=0)
            self._most_characters = self._max_length * max(longest, _LEAST_PER_TOKEN)
        if len(text) > self._most_characters:
            raise TooLongError(
                f"a text of {len(text):,} characters has more than {self._max_length:,} tokens",
                why=f"the tokens of this model have room for {self._most_characters:,} characters; it was not encoded",
                fix="shorten the text, or raise rollout.max_model_len",
            )

    def decode(self, token_ids: Ints, *, special: bool) -> str:
        """Return the text of ``token_ids``; ``special`` keeps special tokens."""
        return decode_text(self.tokenizer, token_ids.tolist(), special=special)

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
        mark = f"{_MARK} {secrets.token_hex(16)}"  # random: no text of another can hold it
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
        ids, ends = self._encode(whole), self._ends(self._encode(begun))
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
                **(options or {}),
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
        found["tool_calls"] = [
            {**call, "function": _with_object(call["function"])} if call.get("function") else _with_object(call)
            for call in calls
        ]
    return found


def decode_text(tokenizer: Any, token_ids: Sequence[int], *, special: bool) -> str:
    """Return the text of ``token_ids`` as it is; ``special`` keeps special tokens.

    Some tokenizers would "clean it up", and make ``x!= y.`` of ``x != y .``; nobody would see the policy's own text.
    """
    return str(tokenizer.decode(token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def _schemas(tools: Tools | str | None) -> Tools:
    """Return a row's ``tools``. Raises ValueError if they are no schemas."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"its tools are no JSON: {exc}") from exc
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"its tools must be a list of JSON schemas, or the JSON text of one: {str(tools)[:80]!r}")
    return tools or ()


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
