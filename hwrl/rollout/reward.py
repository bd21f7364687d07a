"""Load the user's reward function, call it, and check its results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, SupportsFloat

from hwrl.errors import DataError, short_repr
from hwrl.user_code import load_function

Reward = Callable[..., Any]
"""``reward(prompt, response, answer)``, sync or async. :class:`RewardFunction` has its arguments and results."""

_RESERVED = {"mean": "reward/mean", "std": "reward/std", "version": "eval/version"}
"""Names of metrics that a reward function cannot use, and the metrics of hwrl that have them."""
_NAME = re.compile(r"\w[\w./@+-]{0,99}")
_LARGEST = 1e15
"""The largest absolute value of a reward or metric: they are float32, and their squares must not overflow."""
_POSITIONAL = 3
"""The number of positional arguments: prompt, response and answer."""


@dataclass(frozen=True)
class RewardColumns:
    """The columns of a row that a reward function gets by name.

    Each row must have the ``required`` columns. The parameters of the ``optional`` columns have a default. With
    ``rest`` the function takes ``**columns``: it gets all columns but those in ``taken``, the names of its first three
    parameters.
    """

    required: Collection[str] = ()
    optional: Collection[str] = ()
    rest: bool = False
    taken: Collection[str] = ()

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of ``row`` that the function gets."""
        named = {*self.required, *self.optional}
        return {name: row[name] for name in row if name in named or (self.rest and name not in self.taken)}


@dataclass(frozen=True)
class ToScore:
    """A prompt to score: the texts of its responses, and the ``columns`` of its row for the function."""

    prompt: str
    answer: Any
    texts: Sequence[str]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Scores:
    """The reward function's metrics for each response to a prompt, in order.

    ``errors`` counts the failed calls, repeated or not. ``failure`` is the reason if the prompt failed; then the last
    responses have no metrics. ``stuck`` is true if its process must end: a call could not be cancelled, or closed the
    standard input, output or error.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    errors: int = 0
    failure: str | None = None
    stuck: bool = False


class RewardFunction:
    """The user's reward function, ready to be called.

    It is called once for each response, as ``function(prompt, response, answer)``. With ``batch`` it is called once for
    all responses of a prompt: each argument is a list with an element for each response, and so is the result. A
    further parameter gets the row's column of its name; ``**columns`` gets all columns. ``source`` is the name of the
    data set, unless the row has a column ``source``. The result for a response is a number, or a mapping with the key
    ``reward`` and further metrics. None means that the response cannot be judged.

    Raises DataError if the function cannot take three positional arguments.
    """

    def __init__(self, function: Reward, *, batch: bool = False) -> None:
        self._function, self._batch = function, batch
        self.is_async = _is_async(function)
        """Whether a call returns an awaitable."""
        self.columns = _columns_of(function)

    def calls(self, work: ToScore) -> list[Callable[[], Any]]:
        """Return the calls that score ``work``, in order."""
        if not self._batch:
            return [partial(self._function, work.prompt, text, work.answer, **work.columns) for text in work.texts]
        count = len(work.texts)
        columns = {name: [value] * count for name, value in work.columns.items()}
        return [partial(self._function, [work.prompt] * count, list(work.texts), [work.answer] * count, **columns)]

    def metrics_of(self, result: Any, work: ToScore) -> list[dict[str, float]]:
        """Return the metrics of one call's ``result``: one mapping per response.

        Raises DataError if a value is not a finite number, if its name is reserved or not a valid metric name, or if a
        batch has another length. Raises UnjudgedError for None.
        """
        if not self._batch:
            return [metrics_of(result)]
        if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != len(work.texts):
            raise DataError(
                f"the reward function has no list of {len(work.texts)} results",
                why=f"it returned {short_repr(result)}, and reward.batch=true",
                fix="return a list with one number, or one mapping, for each response",
            )
        return [metrics_of(one) for one in result]

    def take(self, outcome: Callable[[], Any], scores: Scores, work: ToScore, *, index: int) -> bool:
        """Add the metrics of the result that ``outcome`` returns, or its failure; return False for another attempt.

        It is the outcome of call ``index``; it may raise anything.
        """
        scores.failure = None
        try:
            scores.metrics += self.metrics_of(outcome(), work)
        except UnjudgedError as exc:
            scores.failure = f"{exc} {where(work.texts, None if self._batch else index)}"
        except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
            scores.errors += 1
            raised = f"the reward function raised {short_repr(exc)}"
            scores.failure = f"{raised} {where(work.texts, None if self._batch else index)}"
            return False
        return True


class UnjudgedError(Exception):
    """The function returned None: it cannot judge a response. The call is not repeated."""


def load_reward(target: str, *, source: bytes | None = None) -> Reward:
    """Return the function at ``target``, as :func:`~hwrl.user_code.load_function` does. Raises DataError.

    >>> load_reward("hwrl.run.demo:sort_reward")("21>", "12", "12")["reward"]
    1.0
    """
    return load_function(target, key="reward.function", source=source)


def score(
    reward: RewardFunction,
    work: ToScore,
    *,
    attempts: int,
    begin: Callable[[int, int], None] = lambda index, attempt: None,
) -> Scores:
    """Call ``reward``, not an async one, for each response. A call that raises has up to ``attempts`` attempts.

    ``begin`` is called with the call's index and the attempt before each attempt. The first failure ends the scoring.
    """
    scores = Scores()
    for index, call in enumerate(reward.calls(work)):
        for attempt in range(1, attempts + 1):
            begin(index, attempt)
            if reward.take(call, scores, work, index=index):
                break
        if scores.failure is not None:
            break
    return scores


def where(texts: Sequence[str], index: int | None) -> str:
    """Return the end of a message about a call: for which of the responses, or how many if ``index`` is None."""
    return f"for {len(texts)} responses" if index is None else f"for the response {short_repr(texts[index])}"


def metrics_of(result: Any) -> dict[str, float]:
    """Return the metrics in the ``result`` for one response, as floats, with ``reward`` among them.

    Raises DataError for an invalid name or value, UnjudgedError for None.
    """
    if result is None:
        raise UnjudgedError("the reward function returned None: it cannot judge; this was")
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


def _is_async(function: Reward) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - the method itself is inspected


def _columns_of(function: Reward) -> RewardColumns:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions in C have none
        return RewardColumns()
    parameters = list(signature.parameters.values())
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(by_place) < _POSITIONAL and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise DataError(
            "the reward function cannot be called",
            why=f"it takes {signature}, and hwrl passes prompt, response and answer",
            fix="write: def reward(prompt, response, answer)",
        )
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY] + by_place[_POSITIONAL:]
    required = [one.name for one in named if one.default is one.empty]
    optional = [one.name for one in named if one.default is not one.empty]
    rest = any(one.kind is one.VAR_KEYWORD for one in parameters)
    taken = [one.name for one in by_place[:_POSITIONAL] if one.kind is one.POSITIONAL_OR_KEYWORD]
    return RewardColumns(required, optional, rest, taken)


def check_columns(required: Collection[str], row: Mapping[str, Any], *, place: str) -> None:
    """Raise DataError if ``row`` lacks one of the ``required`` columns. ``place`` is the row's, for the message."""
    missing = sorted(set(required) - {*row, "source"})
    if missing:
        raise DataError(
            f"the reward function names a column that {place} lacks: {', '.join(missing)}",
            why=f"the row's further columns are: {', '.join(sorted(row)) or 'none'}",
            fix="rename the parameter, give it a default, or add the column to each row",
        )


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
