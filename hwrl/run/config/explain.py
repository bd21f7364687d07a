"""Explain mistakes in a configuration: pydantic's errors as sentences, with suggestions."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

_MAX_SHOWN = 100
_RENAMED = {"reward.threads": "reward.workers, which counts processes"}
"""Keys of earlier versions, each with the key that has replaced it."""


def describe(error: Any, *, root: type[BaseModel]) -> str:
    """Return one line about one of pydantic's errors: the key, the mistake and the value, or a suggested key.

    ``root`` is the pydantic model of the whole configuration.
    """
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith("<"))  # "<…>": the tag of a union
    if error["type"] == "model_type":
        return f"{key}: it is a section, not a value; did you mean {' or '.join(keys_in(key, root=root))}?"
    if error["type"] == "extra_forbidden":
        likely = [_RENAMED[key]] if key in _RENAMED else _likely_keys(key, root=root)
        return f"{key}: there is no such key" + (f", did you mean {' or '.join(likely)}?" if likely else "")
    given = error["input"]
    is_shown = error["type"] != "missing" and isinstance(given, str | int | float) and len(str(given)) <= _MAX_SHOWN
    message = error["msg"].removeprefix("Value error, ")
    return f"{key or 'the configuration'}: {message}" + (f"; it is {given!r}" if is_shown else "")


def keys_in(section: str, *, root: type[BaseModel]) -> list[str]:
    """Return the required keys of ``section``; all its keys if none is required; nothing if it is not a section."""
    kind = root.model_fields[section].annotation if section in root.model_fields else None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    required = [key for key, field in kind.model_fields.items() if field.is_required()]
    return [f"{section}.{key}" for key in required or kind.model_fields]


def _likely_keys(key: str, *, root: type[BaseModel]) -> list[str]:
    """Return the keys that the user may have meant.

    These are the keys of other sections with the same last part, with those of the optional critic at the end. If there
    are none: the key with the most similar spelling, or the keys with a similar last part.
    """
    keys = _all_keys(root)
    name = key.rpartition(".")[2]
    moved = [candidate for candidate in keys if candidate.rpartition(".")[2] == name]
    if moved:
        return sorted(moved, key=lambda candidate: candidate.startswith("critic."))
    similar = difflib.get_close_matches(key, keys, n=1)
    if similar:
        return similar
    last = difflib.get_close_matches(name, {candidate.rpartition(".")[2] for candidate in keys}, n=1)
    return [candidate for candidate in keys if last and candidate.rpartition(".")[2] == last[0]]


def _all_keys(root: type[BaseModel]) -> list[str]:
    """Return every key, such as ``train`` and ``train.steps``. A section comes before its keys."""
    keys = []
    for name, field in root.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(f"{name}.{key}" for key in field.annotation.model_fields)
    return keys
