"""A judge for async reward functions: a model behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hwrl.errors import ConfigError


class Judge:
    """Asks the model ``model`` behind an OpenAI-compatible server, for an async reward function.

    ``base_url`` ends with ``/v1`` for most servers. ``api_key_env`` is the name of the environment variable with the
    key; None means that the server needs no key. Each reward worker's process sends up to ``max_concurrency`` requests
    at once; the others wait. A request fails if the server sends nothing for ``timeout_s``. It is repeated up to
    ``max_retries`` times after a failed connection, a timeout, status 408, 409 or 429, or a server error. The pauses
    grow exponentially, or follow the server's ``Retry-After``. The package ``openai`` sends the requests.

    Make one judge in the reward's module; it opens its connections at the first question. Raises ConfigError if
    ``openai`` is not installed, or if the environment lacks the key.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        max_concurrency: int = 16,
        max_retries: int = 5,
        timeout_s: float = 60.0,
    ) -> None:
        require_openai()
        self._model, self._limit = model, max_concurrency
        self._options = {
            "base_url": base_url,
            "api_key": _api_key(api_key_env),
            "max_retries": max_retries,
            "timeout": timeout_s,
        }
        self._client: Any = None

    async def ask(self, question: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the model's answer to ``question``, a text or messages; "" if the answer has no text.

        ``options`` are fields of the request: ``temperature``, ``max_tokens``, and so on. Raises ``openai.OpenAIError``
        if the last attempt fails. Always call it from the same event loop.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if self._client is None:
            self._client = importlib.import_module("openai").AsyncOpenAI(**self._options)
            self._slots = asyncio.Semaphore(self._limit)
        async with self._slots:
            answer = await self._client.chat.completions.create(model=self._model, messages=messages, **options)
        return answer.choices[0].message.content or ""

    async def close(self) -> None:
        """Close the connections. Reward workers need not call it: connections end with their process."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def require_openai() -> None:
    """Raise ConfigError if ``openai`` is not installed; imports nothing."""
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            "a judge cannot be asked",
            why="openai, the library that sends the requests, is not installed",
            fix="pip install 'hwrl[judge]'",
        )


def _api_key(variable: str | None) -> str:
    if variable is None:
        return "none"  # the client insists on one
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            "the judge has no API key",
            why=f"the environment variable {variable} is not set, and api_key_env names it",
            fix=f"export {variable}=… before the run starts",
        )
    return key
