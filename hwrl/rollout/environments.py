"""A built-in workflow: episodes of text environments with Gymnasium's ``reset`` and ``step``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hwrl.errors import DataError
from hwrl.interfaces import Trajectory
from hwrl.rollout.data import Prompt
from hwrl.rollout.reward import metrics_of
from hwrl.rollout.workflow import PolicyClient, Workflow
from hwrl.user_code import load_function


class TextEnvironment(Protocol):
    """An environment with the methods of ``gymnasium.Env``. Observations and actions are texts.

    Each method may be a coroutine function. Any other method is called in a thread, so it may block. A method ``close``
    is optional; it is called after the episode, also after an error. See https://gymnasium.farama.org/api/env/.
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
        env: TextEnvironment = await call_maybe_async(constructor, **options)
        try:
            return await play_episode(env, client, prompt)
        finally:
            if callable(close := getattr(env, "close", None)):
                await call_maybe_async(close)

    async def play_episode(env: TextEnvironment, client: PolicyClient, prompt: Prompt) -> Trajectory:
        row = {**prompt.row, "prompt": prompt.text, "answer": prompt.answer}
        observation, info = await call_maybe_async(env.reset, options=row)
        trajectory = client.begin(prompt.token_ids)
        reward, turns, ended, cut = 0.0, 0, False, False
        while not ended and turns < max_turns:
            if observation:
                trajectory.add(client.chat.encode(observation))
            if trajectory.room <= 0:
                break
            response = await trajectory.generate()
            text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
            observation, gained, terminated, cut, info = _checked(await call_maybe_async(env.step, text), make)
            reward, turns, ended = reward + gained, turns + 1, terminated or cut
        if not turns:
            raise DataError(
                f"the episode of the prompt {prompt.text[:80]!r} has no turn",
                why="the first observation leaves the policy no room",
                fix="raise rollout.max_model_len, or shorten the observation",
            )
        return trajectory.finish(reward, {**_numbers(info), "turns": float(turns)}, truncated=cut or not ended)

    return play


async def call_maybe_async(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and return its result; await the result if that is awaitable.

    A coroutine function is called in the event loop. Any other is called in a thread, since it may block. If it raises
    StopIteration or SystemExit there, this raises RuntimeError: asyncio would never deliver the first, and would end
    its loop at the second.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(_call, function, args, kwargs)
    return await result if inspect.isawaitable(result) else result  # of a decorator around a coroutine function


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except (StopIteration, SystemExit) as exc:
        raise RuntimeError(f"{getattr(function, '__name__', function)} raised {exc!r}") from exc


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
            why=f"it returned {str(result)[:200]!r}",
            fix="return (observation, reward, terminated, truncated, info)",
        ) from exc
