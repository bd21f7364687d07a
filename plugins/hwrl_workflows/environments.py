"""A workflow: episodes of text environments with Gymnasium's ``reset`` and ``step``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

from hwrl.errors import DataError, short_repr
from hwrl.interfaces import Trajectory
from hwrl.rollout import ChatTokens, PolicyClient, Prompt, TooLongError, Workflow, metrics_of
from hwrl.user_code import load_function

_log = logging.getLogger(__name__)
METHOD_END_S = 2.0
"""After a run's cancellation, ``close`` waits this long for the environment's method that still runs in a thread."""


class TextEnvironment(Protocol):
    """An environment with the methods of ``gymnasium.Env``. Observations and actions are texts.

    Each method may be a coroutine function. Any other method is called in a thread, so it may block. A method ``close``
    is optional; it is called after the episode, also after an error, and after an episode that is cancelled before the
    environment is made. See https://gymnasium.farama.org/api/env/.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; return the first observation, and information. ``seed`` is not passed.

        The observation follows the prompt; it is "" if there is none. ``options`` is the prompt's row: ``prompt`` (as
        text), ``answer``, and the other columns.
        """
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the policy's text as the action; return observation, reward, terminated, truncated, information."""
        ...


def environment(
    *, tokenizer: Any, make: str, make_options: Mapping[str, Any] | None = None, max_turns: int = 16
) -> Workflow:
    """Return a workflow that plays one episode of at most ``max_turns`` turns. A factory for ``rollout.workflow``.

    ``make`` is the import path of a function or class. Each episode calls it with ``make_options``, in a thread, for a
    new :class:`TextEnvironment`. The reward is the sum of the steps' rewards. Metrics are ``turns``, and those entries
    of the last step's information with a finite number and a valid name. An observation is tokenised as text, without
    added special tokens.
    """
    constructor = load_function(make, key="rollout.workflow_options.make")
    options = dict(make_options or {})

    async def play(client: PolicyClient, prompt: Prompt) -> Trajectory:
        env = _OwnEnvironment(constructor, options)
        await env.open()
        try:
            return await play_episode(env, client, prompt)
        finally:
            await env.close()

    async def play_episode(env: _OwnEnvironment, client: PolicyClient, prompt: Prompt) -> Trajectory:
        row = {**prompt.row, "prompt": prompt.text, "answer": prompt.answer}
        observation, info = await env.call("reset", options=row)
        trajectory = client.begin(prompt.token_ids)
        reward, turns, ended, cut = 0.0, 0, False, False
        while not ended and turns < max_turns:
            try:
                encode = partial(ChatTokens.encode, text=observation)
                observed = await client.chat.off_loop(encode, characters=len(observation))
            except TooLongError:
                break
            if len(observed):
                trajectory.add(observed)
            if trajectory.room <= 0:
                break
            response = await trajectory.generate()
            text = client.chat.decode(response.token_ids, special=False)
            observation, gained, terminated, cut, info = _checked(await env.call("step", text), make)
            reward, turns, ended = reward + gained, turns + 1, terminated or cut
        if not turns:
            raise DataError(
                f"the episode of the prompt {prompt.text[:80]!r} has no turn",
                why="the first observation leaves the policy no room",
                fix="raise rollout.max_model_len, or shorten the observation",
            )
        return trajectory.finish(reward, {**_numbers(info), "turns": float(turns)}, truncated=cut or not ended)

    return play


class _OwnEnvironment:
    """The environment of one episode. Its constructor and methods run in threads, but for coroutine functions.

    A thread goes on if its caller is cancelled. So an environment that is made too late is closed by the thread that
    made it, and ``close`` waits for a method that still runs, for up to ``METHOD_END_S``.
    """

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._make, self._options = make, options
        self._env: Any = None
        self._given_up = False
        self._running: Future[None] | None = None  # the newest method in a thread
        self._guard = threading.Lock()

    async def open(self) -> None:
        """Make the environment."""
        if inspect.iscoroutinefunction(self._make):
            self._env = await self._make(**self._options)
            return
        try:
            self._env = await call_maybe_async(self._construct)
        except asyncio.CancelledError:
            if (made := self._give_up()) is not None:  # it was on its way to this task
                threading.Thread(target=_close_late, args=[made], daemon=True).start()
            raise

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``name``."""
        method = getattr(self._env, name)
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await call_maybe_async(self._run, method, args, kwargs)

    async def close(self) -> None:
        """Call ``close``, if there is one."""
        close = getattr(self._give_up(), "close", None)
        if inspect.iscoroutinefunction(close):
            try:
                if self._running is not None and not self._running.done():
                    await asyncio.to_thread(self._wait)
            finally:
                await close()
        elif callable(close):
            await call_maybe_async(self._close_at_end, close)

    def _give_up(self) -> Any:
        """Let no method begin any longer; return the environment, or None if it is not made yet."""
        with self._guard:
            self._given_up = True
            return self._env

    # -- in a thread --------------------------------------------------------------------------------------------

    def _construct(self) -> Any:
        made = _call(self._make, (), self._options)
        with self._guard:
            self._env, late = made, self._given_up
        if late:
            _close_late(made)
        return made

    def _run(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._guard:
            if self._given_up:
                raise RuntimeError("nobody waits for this call any longer")
            self._running = running = Future[None]()
        try:
            return _call(method, args, kwargs)
        finally:
            running.set_result(None)

    def _close_at_end(self, close: Callable[[], Any]) -> Any:
        self._wait()
        return _call(close, (), {})

    def _wait(self) -> None:
        if self._running is not None:
            wait([self._running], METHOD_END_S)


def _close_late(env: Any) -> None:
    """Close an environment that nobody waits for. Blocks. Errors go to the log."""
    try:
        if callable(close := getattr(env, "close", None)) and inspect.isawaitable(closing := close()):
            asyncio.run(_result(closing))
    except BaseException as exc:  # noqa: BLE001 - users' code may raise anything
        _log.warning("an environment that came too late was not closed: %s", short_repr(exc))


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def call_maybe_async(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and return its result; await the result if that is awaitable.

    A coroutine function is called in the event loop. Any other is called in a thread, since it may block. If it raises
    no Exception there, or StopIteration, this raises RuntimeError: asyncio would never deliver a StopIteration, would
    end its loop at a SystemExit, and a CancelledError would look like a cancellation of the caller.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(_call, function, args, kwargs)
    return await result if inspect.isawaitable(result) else result  # of a decorator around a coroutine function


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as exc:
        if isinstance(exc, Exception) and not isinstance(exc, StopIteration):
            raise
        raise RuntimeError(f"{getattr(function, '__name__', function)} raised {short_repr(exc)}") from exc


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of ``info`` that are valid metrics; an environment may put anything there."""
    found: dict[str, float] = {}
    for name, value in info.items():
        with contextlib.suppress(DataError):
            found |= metrics_of({name: value, "reward": 0.0})
    return {name: value for name, value in found.items() if name != "reward"}


def _checked(result: Any, make: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    try:
        observation, reward, terminated, truncated, info = result
        return str(observation), float(reward), bool(terminated), bool(truncated), dict(info)
    except (TypeError, ValueError) as exc:
        raise DataError(
            f"a step of {make} did not return what an environment returns",
            why=f"it returned {short_repr(result)}",
            fix="return (observation, reward, terminated, truncated, info)",
        ) from exc
