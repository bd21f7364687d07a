"""Checks of what a rollout engine is asked for, and of what a run of a workflow returned."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hwrl.errors import EngineError, UnsupportedError, short_repr
from hwrl.interfaces import MEMORY_TAGS, GenerationRequest, Segment, Trajectory, WeightOffer
from hwrl.interfaces.rollout import adapter_unsupported
from hwrl.rollout.reward import metrics_of

if TYPE_CHECKING:
    import torch

    from hwrl.weights import Taken

_log = logging.getLogger(__name__)
_COLUMNS: Mapping[str, type] = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "rewards": np.float32,
}
"""The columns of a segment."""


def require_fit(request: GenerationRequest, *, max_length: int) -> None:
    """Raise EngineError if ``request`` has no prompt, or may need more than ``max_length`` tokens with its response."""
    wanted = len(request.prompt_ids) + request.sampling.max_new_tokens
    if not len(request.prompt_ids) or wanted > max_length:
        raise EngineError(
            f"request {request.request_id} does not fit the engine",
            why=f"its prompt has {len(request.prompt_ids)} tokens (at least 1 is needed) and its response may have "
            f"{request.sampling.max_new_tokens}; together at most {max_length} fit",
            fix="shorten the prompt, raise data.max_prompt_tokens or lower rollout.max_new_tokens",
        )


def require_weights(version: int, *, pending: int) -> None:
    """Raise EngineError if there are ``pending`` requests but no weights (``version`` is -1)."""
    if pending and version < 0:
        raise EngineError(
            f"{pending} requests are pending, but the engine has no weights",
            why="its model holds arbitrary values until the first weights arrive",
            fix="call load_weights before the first step",
        )


def require_memory_tags(tags: Collection[str]) -> None:
    """Raise EngineError if one of ``tags`` is none of MEMORY_TAGS, or if ``tags`` is a text."""
    unknown = [tags] if isinstance(tags, str) else sorted(set(tags) - MEMORY_TAGS)
    if unknown:
        raise EngineError(
            f"the engine cannot wake {', '.join(unknown)}",
            why=f"the parts that sleep are {', '.join(sorted(MEMORY_TAGS))}",
            fix='wake(), or for example wake(["weights"]): a collection of these names',
        )


def require_sleep(level: int, *, pending: int) -> None:
    """Raise EngineError if there is no such sleep ``level``, or if there are ``pending`` requests."""
    if level not in (1, 2):
        raise EngineError(
            f"the engine cannot sleep at level {level}",
            why="there are two levels: 1 keeps the weights in host memory, 2 drops them",
            fix="sleep(level=1) or sleep(level=2)",
        )
    if pending:
        raise EngineError(
            "the engine cannot sleep now",
            why=f"{pending} requests are pending, and their attention cache would be lost",
            fix="step until none is pending, or abort()",
        )


def require_awake(asleep: Collection[str], tags: Collection[str], *, needed_for: str) -> None:
    """Raise EngineError if one of ``tags`` is ``asleep``."""
    sleeping = sorted(set(asleep) & set(tags))
    if sleeping:
        raise EngineError(
            f"the engine cannot {needed_for}", why=f"it sleeps: {', '.join(sleeping)}", fix=f"wake({sleeping}) first"
        )


def require_base(own: int | None, wanted: int) -> None:
    """Raise EngineError unless the engine's base ``own`` is ``wanted``, the base of a new adapter."""
    if own != wanted:
        raise EngineError(
            "the adapter does not belong to the engine's base",
            why=f"it was trained on base {wanted:#x}, and the model holds {'none' if own is None else f'{own:#x}'}",
            fix="load_base with the weights that the adapter was trained on",
        )


def require_adapter(adapter: object) -> None:
    """Raise UnsupportedError if the engine has no ``adapter``: then it can load neither an adapter nor a base."""
    if not adapter:
        raise adapter_unsupported()


def require_no_adapter(adapter: object) -> None:
    """Raise UnsupportedError if the engine has an ``adapter``: then it cannot load a whole model."""
    if adapter:
        raise UnsupportedError(
            "this engine takes no whole model",
            why="its model has an adapter",
            fix="load_base, then load_adapter",
        )


def require_same_model(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Raise EngineError unless ``given`` has the tensors of the state dict ``own``, in their shapes, and no others.

    Of tied tensors, one is enough.
    """
    tied = {_place(tensor) for name, tensor in own.items() if name in given}
    missing = sorted(name for name, tensor in own.items() if name not in given and _place(tensor) not in tied)
    unknown = sorted(given.keys() - own.keys())
    reshaped = sorted(name for name in given.keys() & own.keys() if given[name].shape != own[name].shape)
    if missing or unknown or reshaped:
        raise EngineError(
            "the weights do not belong to this model",
            why=f"missing: {missing[:3]}, unknown: {unknown[:3]}, of another shape: {reshaped[:3]}",
            fix="send the weights of the same model, under their Hugging Face names",
        )


def require_held(results: Sequence[Taken], offer: WeightOffer) -> Taken | None:
    """Return the version that all receivers hold after ``offer``.

    Returns None, and logs the reason, if they hold different versions or one holds none. Raises EngineError if a
    receiver itself failed.
    """
    faults = [f"receiver {number}: {taken.why}" for number, taken in enumerate(results) if taken.fault]
    if faults:
        raise EngineError(
            f"version {offer.version} was not received, and the version before is gone",
            why="; ".join(faults),
            fix="correct the reason; the next whole version repairs the engine",
        )
    held = {(taken.epoch, taken.version) for taken in results}
    if len(held) == 1 and results[0].proposal:
        return max(results)
    missing = [f"receiver {number}: {taken.why}" for number, taken in enumerate(results) if not taken.proposal]
    _log.warning(
        "version %d is not in the engine, which has none now: %s", offer.version, "; ".join(missing) or sorted(held)
    )
    return None


def checked_sample(result: Any, *, max_length: int, vocabulary: int) -> Sequence[Trajectory]:
    """Return a run's trajectories, with float numbers and arrays of the right types.

    Raises an error if they cannot be trained: a trajectory has at most ``max_length`` tokens, with ids below
    ``vocabulary``.
    """
    sample = (result,) if isinstance(result, Trajectory) else result
    is_sample = isinstance(sample, Sequence) and all(isinstance(row, Trajectory) for row in sample)
    if not is_sample or not sample:
        raise ValueError(f"a workflow returns a Trajectory, or a sequence of them, not {short_repr(result)}")
    sample = [replace(row, segments=[_typed(part) for part in row.segments]) for row in sample]
    for row in sample:
        _check_segments(row, max_length, vocabulary)
    return [_with_floats(row) for row in sample]


def _typed(part: Segment) -> Segment:
    """Return ``part`` with its columns as arrays of their types: a user's may be lists, or hold other numbers."""
    changed: dict[str, Any] = {}
    for name, dtype in _COLUMNS.items():
        column = getattr(part, name)
        if column is None or (type(column) is np.ndarray and column.dtype == dtype and column.ndim == 1):
            continue
        given = np.asarray(column)
        with np.errstate(all="ignore"):  # a number that is too large is told of below, or as infinite
            changed[name] = given.astype(dtype)
        if given.ndim != 1 or (dtype is np.int32 and not np.array_equal(changed[name], given)):
            raise ValueError(f"{name} of a segment are not a row of {dtype.__name__}, but {short_repr(column)}")
    return replace(part, **changed) if changed else part


def _with_floats(row: Trajectory) -> Trajectory:
    """Return ``row`` with its reward and metrics as floats: a user's number may be of any type, such as a tensor."""
    metrics = metrics_of({**row.metrics, "reward": 0.0 if row.reward is None else row.reward})
    reward = metrics.pop("reward")
    return replace(row, reward=None if row.reward is None else reward, metrics=metrics)


def _check_segments(row: Trajectory, max_length: int, vocabulary: int) -> None:
    ids = np.concatenate([segment.token_ids for segment in row.trained_segments])
    if len(ids) > max_length:
        raise ValueError(f"a trajectory has {len(ids)} tokens, and rollout.max_model_len allows {max_length}")
    if not isinstance(row.truncated, bool | np.bool_):
        raise ValueError(f"truncated is true or false, not {short_repr(row.truncated)}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"a trajectory has token {ids.min() if ids.min() < 0 else ids.max()}, unknown to the model")
    if not all(np.isfinite(x).all() for part in row.segments for x in (part.rewards, part.logprobs) if x is not None):
        raise ValueError("a token's log-probability, or the reward of a turn or a token, is not a finite number")


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())  # a meta tensor has no address
