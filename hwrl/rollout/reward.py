"""The user's reward function, named by import path or by file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from hwrl.errors import DataError

Reward = Callable[[str, str, Any], float | Mapping[str, float]]
"""``reward(prompt, response, answer)``: a number, or a mapping with the key ``reward`` and other figures to report."""

_TAKEN = {"mean": "reward/mean", "std": "reward/std", "version": "eval/version"}
"""Names of figures under which the metrics already have something."""
_NAME = re.compile(r"\w[\w./@+-]{0,99}")
_LARGEST = 1e15
"""Rewards are kept in float32, and their squares must not overflow."""


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
    return function  # type: ignore[no-any-return] # the user's function; score_response() checks what it returns


def score_response(reward: Reward, *, prompt: str, response: str, answer: Any) -> dict[str, float]:
    """Call ``reward`` and return its figures, ``reward`` among them.

    Raises DataError if one is no number that training can compute with, or if its name is one that hwrl itself uses,
    or none that metrics can have.
    """
    result = reward(prompt, response, answer)
    figures = dict(result) if isinstance(result, Mapping) else {"reward": result}
    for name in figures:
        _check_name(name)
    if "reward" not in figures or not all(map(_is_usable, figures.values())):
        raise DataError(
            "the reward is not a finite number, or a figure beside it is not",
            why=f"the function returned {_short(result)}",
            fix=f"return a finite number, or {{'reward': number, …}} with finite numbers, up to {_LARGEST:g}",
        )
    return {name: float(value) for name, value in figures.items()}


def _is_usable(value: Any) -> bool:
    if not isinstance(value, SupportsFloat):  # a text is refused, also one that float() can read
        return False
    try:
        return abs(float(value)) <= _LARGEST
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers, an integer too long
        return False


def _check_name(name: Any) -> None:
    if name in _TAKEN:
        why, fix = f"metrics have {_TAKEN[name]}, which hwrl computes itself", "give the figure another name"
    elif not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "a name is a text of up to 100 letters, digits and _ . / @ + - that begins with a letter, a digit or _"
        fix = "rename the figure"
    else:
        return
    raise DataError(f"the reward function cannot return a figure called {_short(name)}", why=why, fix=fix)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


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
    except (Exception, SystemExit) as exc:
        raise _broken(name, exc) from exc


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"hwrl_reward_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"there is no file {path}", why="reward.function names it", fix="correct the path")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        raise _broken(str(path), exc) from exc
    return module


def _broken(place: str, exc: BaseException) -> DataError:
    ends = isinstance(exc, SystemExit)
    return DataError(
        f"the reward's code in {place} cannot be loaded",
        why=f"it {'ended the process' if ends else 'raised'}: {exc!r}",
        fix="put what a script does under `if __name__ == '__main__':`" if ends else "fix what the reason names",
    )
