"""A judge for async reward functions: a model behind an OpenAI-compatible server; see ``docs/rewards.md``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hwrl.errors import ConfigError, EngineError, message_of

__all__ = ["Judge"]

_MOST_NBYTES, _SHOWN_NBYTES = 1 << 22, 200
"""The most bytes of an answer; those that an error shows."""
_FRAMING = frozenset({"content-length", "transfer-encoding", "content-encoding"})


class Judge:
    """Asks the model ``model`` behind an OpenAI-compatible server, for an async reward function.

    ``base_url`` ends with ``/v1`` for most servers. ``api_key_env`` is the name of the environment variable with the
    key; None means that the server needs no key. Each reward worker's process sends up to ``max_concurrency`` requests
    at once; the others wait. A request fails if its answer is not complete within ``timeout_s``, has more than 4 MiB,
    is compressed, or is no chat completion with a text. It is repeated up to ``max_retries`` times after that, a failed
    connection, status 408, 409 or 429, or a server error. The pauses grow exponentially, or follow the server's
    ``Retry-After``. The package ``openai`` sends the requests. Redirects are not followed.

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
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": _api_key(api_key_env),
            "max_retries": max_retries,
            "timeout": timeout_s,
        }
        self._client: Any = None

    async def ask(self, question: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the model's answer to ``question``, a text or messages; "" if the answer has no text.

        ``options`` are fields of the request: ``temperature``, ``max_tokens``, and so on. Raises EngineError with the
        server's answer if the last attempt fails. Always call it from the same event loop.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        openai = importlib.import_module("openai")
        if self._client is None:
            checked = _checked_client(openai, self._options["timeout"])
            self._client = openai.AsyncOpenAI(http_client=checked, **self._options)
            self._slots = asyncio.Semaphore(self._limit)
        async with self._slots:
            try:
                answer = await self._client.chat.completions.create(model=self._model, messages=messages, **options)
            except openai.OpenAIError as exc:
                raise EngineError(
                    f"the judge at {self._options['base_url']} gave no usable answer",
                    why=message_of(exc),
                    fix="look at the server's log, and check base_url, the model's name and the key",
                ) from exc
        return str(answer.choices[0].message.content or "")

    async def close(self) -> None:
        """Close the connections. Reward workers need not call it: connections end with their process."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _checked_client(openai: Any, timeout_s: float) -> Any:
    """Return an HTTP client for ``openai`` that makes a server's error of each answer that is no chat completion.

    So ``openai`` repeats the request. It would itself read an answer of any size, for any time, and not look into it.
    """

    class CheckedClient(openai.DefaultAsyncHttpxClient):  # type: ignore[misc] # of an optional package
        async def send(self, request: Any, **options: Any) -> Any:
            request.headers["Accept-Encoding"] = "identity"
            status, headers, body = 504, {}, b""
            fault: str | None = f"timed out: its answer was not complete within {timeout_s:g} s"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    response = await super().send(request, **{**options, "stream": True, "follow_redirects": False})
                    try:
                        body, fault = await _body_of(response)
                    finally:
                        await response.aclose()
                status, headers = response.status_code, response.headers
            if fault is None and 200 <= status < 300:
                body, fault = _completion_of(body)
            if fault is not None:
                shown = body[:_SHOWN_NBYTES].decode(errors="replace")
                status, body = max(status, 502), json.dumps({"error": {"message": f"it {fault}: {shown!r}"}}).encode()
                headers = {"Content-Type": "application/json"}
            kept = {name: value for name, value in headers.items() if name.lower() not in _FRAMING and value.isascii()}
            return importlib.import_module(type(request).__module__.partition(".")[0]).Response(
                status, headers=kept, content=body, request=request
            )

    return CheckedClient()


async def _body_of(response: Any) -> tuple[bytes, str | None]:
    """Return the body, or its beginning and what is wrong with it."""
    if response.headers.get("content-encoding", "identity") != "identity":
        return b"", "is compressed, though nobody asked for that"
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > _MOST_NBYTES:
            return bytes(body), f"has more than {_MOST_NBYTES:,} bytes"
    return bytes(body), None


def _completion_of(body: bytes) -> tuple[bytes, str | None]:
    """Return a completion with the text of ``body`` alone; or ``body`` and why it is no chat completion with a text.

    ``openai`` would make objects of everything in it. A content of null is an empty text.
    """
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        return body, f"answered no chat completion ({type(exc).__name__})"
    if not isinstance(content, str | None):
        return body, f"answered {type(content).__name__} instead of a text"
    text = (content or "").encode("utf-8", "replace").decode()  # without lone surrogates
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode(), None


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
