"""One endpoint: an address of the policy for the agent of one run of a workflow."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import secrets
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hwrl.errors import DataError
from hwrl.interfaces import Ints, Tools, Trajectory
from hwrl.rollout import ChatTokens, TooLongError
from hwrl_agents.answers import AnswerFormat, ChatFormat, CompletionFormat
from hwrl_agents.conversations import Conversations, Turn, chat_keys, said_message
from hwrl_agents.requests import ChatRequest, CompletionRequest, EndpointError, GenerationFields

if TYPE_CHECKING:
    from hwrl.rollout import PolicyClient

_numbers = itertools.count(1)
Record: TypeAlias = Callable[[], None]
Answered: TypeAlias = tuple[AnswerFormat, Record]
"""The answers to a request, and a function that records them. The server calls it when it sends them."""


@contextlib.contextmanager
def _refused(param: str) -> Iterator[None]:
    """Let a DataError in the block be one of the request's parameter ``param``."""
    try:
        yield
    except DataError as exc:
        code = "context_length_exceeded" if isinstance(exc, TooLongError) else None
        raise EndpointError(f"{exc.what}: {exc.why}", param=param, code=code) from exc


class Endpoint:
    """An OpenAI-compatible address of the policy for the agent of one run of a workflow.

    An agent needs ``base_url`` and ``api_key``, a secret. All answers that reach the agent are recorded;
    :meth:`trajectories` returns them. After the run the key is invalid.
    """

    def __init__(self, client: PolicyClient, *, chat: ChatTokens, base_url: str) -> None:
        self.base_url = base_url
        self.name = f"hwrl{next(_numbers)}"
        self.api_key = f"{self.name}-{secrets.token_urlsafe(24)}"
        self.max_length = client.max_length
        self._working: set[asyncio.Task[Answered]] = set()
        self._closed = False
        self._context = contextvars.copy_context()
        self._client, self._chat = client, chat
        self._conversations = Conversations()

    def trajectories(self) -> list[Trajectory]:
        """Return the recorded answers, as a trajectory for each conversation, without rewards.

        A request that repeats a recorded conversation continues it. Any other request begins a new one. Tokens,
        log-probabilities and versions are the engine's.
        """
        return self._conversations.trajectories()

    def close(self) -> None:
        """Cancel the unfinished requests, and all later ones."""
        self._closed = True
        for task in list(self._working):
            task.cancel()

    def start(self, work: Coroutine[Any, Any, Answered]) -> asyncio.Task[Answered]:
        """Run ``work``, :meth:`chat` or :meth:`complete`, as a task with the context variables of the workflow.

        The context of the caller is the server's, and a server serves many workflows. After :meth:`close` the task is
        cancelled at once.
        """
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        if self._closed:  # the body of the request arrived late
            task.cancel()
        return task

    async def chat(self, asked: ChatRequest, *, nbytes: int) -> Answered:
        """Return the answers to a chat request of ``nbytes``; :meth:`start` runs this. Raises EndpointError."""
        tools, options = asked.tools, asked.chat_template_kwargs
        keys = chat_keys(asked.messages, tools=tools, options=options)
        with _refused("messages"):
            before, context_ids = await self._chat.off_loop(partial(self._chat_context, asked, keys), characters=nbytes)
        choices = await self._generate(asked, before, context_ids, tools=tools if asked.tool_choice == "auto" else ())
        said = [[*asked.messages, said_message(choice.answer)] for choice in choices]
        keys = [chat_keys(messages, tools=tools, options=options)[-1] for messages in said]
        return ChatFormat(asked, choices, self._chat), self._recorder(choices, keys)

    async def complete(self, asked: CompletionRequest) -> Answered:
        """Return the answers to a completion request; :meth:`start` runs this. Raises EndpointError."""
        prompt = asked.prompt
        if isinstance(prompt, str):
            with _refused("prompt"):
                context = partial(self._text_context, prompt)
                before, context_ids = await self._chat.off_loop(context, characters=len(prompt))
        else:
            before, context_ids = self._ids_context(prompt)
        choices = await self._generate(asked, before, context_ids)
        keys = [self._text_key(prompt, choice) if isinstance(prompt, str) else object() for choice in choices]
        return CompletionFormat(asked, choices, self._chat), self._recorder(choices, keys)

    def _text_key(self, prompt: str, choice: Turn) -> str:
        """Return the text of the conversation with ``choice``, as an agent would repeat it.

        An answer without text gets its special tokens and stop text. With the prompt alone as its key, the same prompt
        again would continue it behind its end token.
        """
        return prompt + (choice.answer.content or self._chat.decode(choice.response.token_ids, special=True))

    def _recorder(self, choices: Sequence[Turn], keys: Sequence[Hashable]) -> Record:
        def record() -> None:
            for choice, key in zip(choices, keys, strict=True):
                self._conversations.record(choice, key=key)

        return record

    # -- contexts: the turn before the request, and the tokens that others added after it ----------------------------

    def _chat_context(self, asked: ChatRequest, keys: Sequence[Hashable], chat: ChatTokens) -> tuple[Turn | None, Ints]:
        messages, tools, options = asked.messages, asked.tools, asked.chat_template_kwargs
        for at in reversed(range(len(messages))):
            before = self._conversations.find(keys[at + 1])
            if before is not None:
                said = before.response.token_ids
                return before, chat.following(messages, at=at, said=said, tools=tools, options=options)
        return None, chat.prompt(messages, tools=tools, options=options)

    def _text_context(self, text: str, chat: ChatTokens) -> tuple[Turn | None, Ints]:
        before, rest = self._conversations.prefix_of_text(text)
        if before is None:
            return None, chat.encode_prompt(text)[1]
        stop = before.response.stop
        rest = rest.removeprefix(stop) if isinstance(stop, str) else rest  # the policy wrote it already
        return before, chat.after(before.response.token_ids, chat.encode(rest))

    def _ids_context(self, token_ids: Sequence[int]) -> tuple[Turn | None, Ints]:
        ids = np.array(token_ids, dtype=np.int32)
        before = self._conversations.prefix_of_ids(ids)
        return before, ids[0 if before is None else len(before.token_ids) :]

    async def _generate(
        self, asked: GenerationFields, before: Turn | None, context_ids: Ints, *, tools: Tools = ()
    ) -> list[Turn]:
        """Return ``asked.n`` turns; they are not recorded here."""
        ids = context_ids if before is None else np.concatenate((before.token_ids, context_ids))
        if not 0 < len(ids) < self.max_length:
            raise EndpointError(
                f"this request has {len(ids)} tokens; a conversation has 1 to {self.max_length}, the answer's included",
                code="context_length_exceeded",
            )
        if (largest := ids.max()) >= self._client.vocabulary:
            raise EndpointError(
                f"the model has tokens 0 to {self._client.vocabulary - 1}, and no {largest}", param="prompt"
            )
        samplings = [asked.sampling(self._client.sampling, choice=choice) for choice in range(asked.n)]
        tasks = [asyncio.ensure_future(self._client.generate(ids, sampling)) for sampling in samplings]
        try:
            responses = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [Turn(before, context_ids, each, self._chat.read(each, tools=tools)) for each in responses]
