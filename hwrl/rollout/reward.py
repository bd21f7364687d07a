"""The user's reward function, named by import path or by file."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hwrl.errors import DataError

Reward = Callable[[str, str, Any], float | Mapping[str, float]]
"""``reward(prompt, response, answer)``: a number, or a mapping with the key ``reward`` and other figures to report."""


def load_reward(target: str) -> Reward:
    """Return the function that ``target`` names: ``package.module:function`` or ``path/to/file.py:function``.

    >>> load_reward("hwrl.run.demo:sort_reward")("21>", "12", "12")["reward"]
    1.0
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise DataError(
            f"{target!r} names no reward function",
            why="it must be package.module:function or path/file.py:function",
            fix="for example reward=my_rewards.py:exact_match",
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(
            f"there is no function {name!r} in {place}", why=f"reward={target!r} asks for it", fix="check it"
        )
    return function  # type: ignore[no-any-return] # the user's function; judge() checks what it returns


def judge(reward: Reward, *, prompt: str, response: str, answer: Any) -> dict[str, float]:
    """Call ``reward`` and return its figures, ``reward`` among them; DataError if it returns no finite number."""
    result = reward(prompt, response, answer)
    figures = dict(result) if isinstance(result, Mapping) else {"reward": result}
    try:
        numbers = {name: float(value) for name, value in figures.items()}
    except (TypeError, ValueError) as exc:
        raise DataError("the reward is not a number", why=f"it is {result!r}", fix="return a float") from exc
    if not math.isfinite(numbers.get("reward", math.nan)):
        raise DataError(
            "the reward is not a finite number", why=f"it is {result!r}", fix="return a float or {'reward': float, …}"
        )
    return numbers


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise DataError(f"module {name} cannot be imported", why=str(exc), fix="install it or name a file") from exc


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"hwrl_reward_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"there is no file {path}", why="reward names it", fix="correct the path")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
