"""Load the user's reward function, and call it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, SupportsFloat

from hwrl.errors import DataError

Reward = Callable[[str, str, Any], float | Mapping[str, float]]
"""``reward(prompt, response, answer)``: a number, or a mapping with the key ``reward`` and further metrics."""

_RESERVED = {"mean": "reward/mean", "std": "reward/std", "version": "eval/version"}
"""Names that a reward function cannot use, and the metric of hwrl with that name."""
_NAME = re.compile(r"\w[\w./@+-]{0,99}")
_LARGEST = 1e15
"""Rewards are kept in float32, and their squares must not overflow."""


def load_reward(target: str, *, source: bytes | None = None) -> Reward:
    """Return the function at ``target``: ``package.module:function`` or ``path/to/file.py:function``.

    ``source`` replaces the content of the module's file, which may have changed since. Raises DataError.

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
    module = _load_file(Path(place), source) if place.endswith(".py") else _load_module(place, source)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(
            f"there is no function {name!r} in {place}",
            why=f"reward.function={target} asks for it",
            fix=_fix_for_name(module, name=name),
        )
    return function  # type: ignore[no-any-return] # the user's function; score_response() checks its result


def score_response(reward: Reward, *, prompt: str, response: str, answer: Any) -> dict[str, float]:
    """Call ``reward`` and return its metrics, ``reward`` among them.

    Raises DataError if a value is not a finite number, or if its name is reserved or not a valid metric name.
    """
    result = reward(prompt, response, answer)
    metrics = dict(result) if isinstance(result, Mapping) else {"reward": result}
    for name in metrics:
        _check_name(name)
    if "reward" not in metrics or not all(map(_is_usable, metrics.values())):
        raise DataError(
            "the reward is not a finite number, or another metric is not",
            why=f"the function returned {short_repr(result)}",
            fix=f"return a finite number, or {{'reward': number, …}} with finite numbers, up to {_LARGEST:g}",
        )
    return {name: float(value) for name, value in metrics.items()}


def score_texts(
    reward: Reward,
    prompt: str,
    answer: Any,
    texts: Sequence[str],
    *,
    attempts: int,
    begin: Callable[[int], None] = lambda index: None,
) -> tuple[list[dict[str, float]], int, str | None]:
    """Call ``reward`` for each of ``texts``, up to ``attempts`` times if it raises.

    Returns the metrics of the responses, the number of calls without a result, and the reason if a response at the end
    of the metrics has none. ``begin`` gets a response's index before each call.
    """
    metrics: list[dict[str, float]] = []
    errors = 0
    for index, text in enumerate(texts):
        for attempt in range(1, attempts + 1):
            begin(index)
            try:
                metrics.append(score_response(reward, prompt=prompt, response=text, answer=answer))
                break
            except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
                errors += 1
                if attempt == attempts:
                    return (
                        metrics,
                        errors,
                        f"the reward function raised {short_repr(exc)} for the response {short_repr(text)}",
                    )
    return metrics, errors, None


def _is_usable(value: Any) -> bool:
    if not isinstance(value, SupportsFloat):  # refuses strings, also those that float() accepts
        return False
    try:
        return abs(float(value)) <= _LARGEST
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers, or a huge integer
        return False


def _check_name(name: Any) -> None:
    if name in _RESERVED:
        why, fix = f"hwrl itself computes the metric {_RESERVED[name]}", "give yours another name"
    elif not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "a name has up to 100 letters, digits and _ . / @ + -, and starts with a letter, a digit or _"
        fix = "rename the metric"
    else:
        return
    raise DataError(f"the reward function cannot return a metric named {short_repr(name)}", why=why, fix=fix)


def short_repr(value: object) -> str:
    """Return ``repr(value)``, cut off after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _fix_for_name(module: Any, *, name: str) -> str:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = difflib.get_close_matches(name, functions, n=1)
    return f"did you mean {close[0]!r}?" if close else f"define {name!r} there, or name another function"


def _load_module(name: str, source: bytes | None) -> Any:
    try:
        spec = None if source is None else importlib.util.find_spec(name)
        return importlib.import_module(name) if spec is None or source is None else _execute(spec, source)
    except ImportError as exc:
        raise DataError(
            f"the reward's module {name} cannot be imported",
            why=str(exc),
            fix="install the missing module, or name a file: reward.function=path/file.py:function",
        ) from exc
    except (Exception, SystemExit) as exc:
        raise _broken(name, exc) from exc


def _load_file(path: Path, source: bytes | None) -> Any:
    spec = importlib.util.spec_from_file_location(f"hwrl_reward_{path.stem}", path)
    if (source is None and not path.is_file()) or spec is None:
        raise DataError(f"there is no file {path}", why="reward.function names it", fix="correct the path")
    try:
        return _execute(spec, path.read_bytes() if source is None else source)
    except (Exception, SystemExit) as exc:
        raise _broken(str(path), exc) from exc


def _execute(spec: ModuleSpec, source: bytes) -> Any:
    """Return the module of ``spec`` with the code ``source``, importable under its name from now on."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    code = compile(source, str(spec.origin), "exec", dont_inherit=True)  # our __future__ imports are not the user's
    exec(code, vars(module))
    return module


def _broken(place: str, exc: BaseException) -> DataError:
    ends = isinstance(exc, SystemExit)
    return DataError(
        f"the reward's code in {place} cannot be loaded",
        why=f"it {'ended the process' if ends else 'raised'}: {exc!r}",
        fix="put the script's own work under `if __name__ == '__main__':`" if ends else "fix the error in the reason",
    )
