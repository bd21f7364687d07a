"""The user's reward function, named by import path or by file."""

from __future__ import annotations

import difflib
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
            fix="for example reward.function=my_rewards.py:exact_match",
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(
            f"there is no function {name!r} in {place}",
            why=f"reward.function={target} asks for it",
            fix=_fix_for_name(module, name=name),
        )
    return function  # type: ignore[no-any-return] # the user's function; judge() checks what it returns


def judge(reward: Reward, *, prompt: str, response: str, answer: Any) -> dict[str, float]:
    """Call ``reward`` and return its figures, ``reward`` among them; DataError if one is no finite number."""
    result = reward(prompt, response, answer)
    figures = dict(result) if isinstance(result, Mapping) else {"reward": result}
    try:
        numbers = {name: float(value) for name, value in figures.items()}
    except (TypeError, ValueError) as exc:
        raise DataError("the reward is not a number", why=f"it is {result!r}", fix="return a float") from exc
    if "reward" not in numbers or not all(map(math.isfinite, numbers.values())):
        raise DataError(
            "the reward is not a finite number, or a figure beside it is not",
            why=f"the function returned {result!r}",
            fix="return a finite float, or {'reward': float, …} with finite floats",
        )
    return numbers


def _fix_for_name(module: Any, *, name: str) -> str:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = difflib.get_close_matches(name, functions, n=1)
    return f"did you mean {close[0]!r}?" if close else f"define {name!r} there, or name a function that is"


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise DataError(
            f"the reward's module {name} cannot be imported",
            why=str(exc),
            fix="install what the reason names, or name a file: reward.function=path/file.py:function",
        ) from exc
    except Exception as exc:
        raise _broken(name, exc) from exc


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"hwrl_reward_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"there is no file {path}", why="reward.function names it", fix="correct the path")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise _broken(str(path), exc) from exc
    return module


def _broken(place: str, exc: Exception) -> DataError:
    return DataError(
        f"the reward's code in {place} cannot be loaded",
        why=f"it raised {type(exc).__name__}: {exc}",
        fix="mend what the reason names; try it alone with python",
    )
