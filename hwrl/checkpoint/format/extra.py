"""The state beside the tensors, as JSON: :func:`copy_extra`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hwrl.errors import CheckpointSaveError


def copy_extra(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of ``value``. The caller may go on changing it.

    Raises CheckpointSaveError for values that JSON would alter: tuples, and keys that are no strings.
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
                raise _not_json(f"the key {key!r} is no string and would come back as one")
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _refuse_altered(one)


def _not_json(why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        "the extra state cannot be saved",
        why=why,
        fix="give JSON with string keys, and lists for tuples; put tensors into the state",
    )
