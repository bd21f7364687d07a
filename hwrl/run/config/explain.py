"""Explain the mistakes in a configuration: pydantic's errors as sentences, with suggestions."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

_MAX_SHOWN = 100
_RENAMED = {"reward.threads": "reward.workers, which counts processes"}
"""Keys of earlier versions, and their successors."""


def describe(error: Any, *, root: type[BaseModel]) -> str:
    """Return one line for one of pydantic's errors: the key, the mistake and the value, or the likely key.

    ``root`` is the model of the whole configuration; its sections are models too.
    """
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith("<"))  # a kind in a union
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
    """Return the required keys of ``section``, or all its keys if none is required; nothing if it is no section."""
    kind = root.model_fields[section].annotation if section in root.model_fields else None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    required = [key for key, field in kind.model_fields.items() if field.is_required()]
    return [f"{section}.{key}" for key in required or kind.model_fields]


def _likely_keys(key: str, *, root: type[BaseModel]) -> list[str]:
    """Return the keys of other sections with the same last part, those of the optional critic last.

    Without one: the key with the most similar spelling, or the keys with a similar last part.
    """
    keys = _all_keys(root)
    name = key.rpartition(".")[2]
    moved = [one for one in keys if one.rpartition(".")[2] == name]
    if moved:
        return sorted(moved, key=lambda one: one.startswith("critic."))
    similar = difflib.get_close_matches(key, keys, n=1)
    if similar:
        return similar
    last = difflib.get_close_matches(name, {one.rpartition(".")[2] for one in keys}, n=1)
    return [one for one in keys if last and one.rpartition(".")[2] == last[0]]


def _all_keys(root: type[BaseModel]) -> list[str]:
    """Return every key, such as ``train`` and ``train.steps``, each section before its keys."""
    keys = []
    for name, field in root.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(f"{name}.{key}" for key in field.annotation.model_fields)
    return keys
