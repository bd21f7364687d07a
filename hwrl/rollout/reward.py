"""Load the user's reward function, and call it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from hwrl.errors import DataError
from hwrl.user_code import load_function

Reward = Callable[[str, str, Any], float | Mapping[str, float]]
"""``reward(prompt, response, answer)``: a number, or a mapping with the key ``reward`` and further metrics."""

_RESERVED = {"mean": "reward/mean", "std": "reward/std", "version": "eval/version"}
"""Names that a reward function cannot use, and the metric of hwrl with that name."""
_NAME = re.compile(r"\w[\w./@+-]{0,99}")
_LARGEST = 1e15
"""Rewards are kept in float32, and their squares must not overflow."""


def load_reward(target: str, *, source: bytes | None = None) -> Reward:
    """Return the function at ``target``, as :func:`~hwrl.user_code.load_function` does. Raises DataError.

    >>> load_reward("hwrl.run.demo:sort_reward")("21>", "12", "12")["reward"]
    1.0
    """
    return load_function(target, key="reward.function", source=source)


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
