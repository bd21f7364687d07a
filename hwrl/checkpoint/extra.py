"""The extra state of a save, which is JSON: :func:`copy_extra`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hwrl.errors import CheckpointSaveError


def copy_extra(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a deep copy of ``value``, so that the caller may change the original afterwards.

    Raises CheckpointSaveError for a value that JSON cannot hold, and for one that JSON would alter: a tuple, or a key
    that is not a string.
    """
    value = dict(value or {})
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as exc:
        raise _not_json(str(exc)) from exc
    _refuse_altered(value)
    return copy


def _refuse_altered(value: object) -> None:
    if isinstance(value, tuple):
        raise _not_json(f"the tuple {value!r} would come back as a list")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _not_json(f"the key {key!r} is not a string and would come back as a string")
        value = list(value.values())
    if isinstance(value, list):
        for element in value:
            _refuse_altered(element)


def _not_json(why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        "the extra state cannot be saved",
        why=why,
        fix="give JSON: only string keys, and lists instead of tuples; put tensors into the state",
    )
