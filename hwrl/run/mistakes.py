"""Sentences about mistakes in a configuration, from what pydantic found."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

_LONGEST = 100


def describe(error: Any, *, root: type[BaseModel]) -> str:
    """Return one line about one of pydantic's errors: the key, the mistake, the value; the likely key if it has none.

    ``root`` is the configuration; its sections are models.
    """
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "model_type":
        return f"{place}: it is a section, not a value; did you mean {' or '.join(keys_in(place, root=root))}?"
    if error["type"] == "extra_forbidden":
        likely = _likely_keys(place, root=root)
        return f"{place}: there is no such key" + (f", did you mean {' or '.join(likely)}?" if likely else "")
    given = error["input"]
    is_told = error["type"] != "missing" and isinstance(given, str | int | float) and len(str(given)) <= _LONGEST
    message = error["msg"].removeprefix("Value error, ")
    return f"{place or 'the whole'}: {message}" + (f"; it is {given!r}" if is_told else "")


def keys_in(section: str, *, root: type[BaseModel]) -> list[str]:
    """Return the keys of ``section`` that must be given, all of its keys if none must, nothing if it is no section."""
    kind = root.model_fields[section].annotation if section in root.model_fields else None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    required = [key for key, field in kind.model_fields.items() if field.is_required()]
    return [f"{section}.{key}" for key in required or kind.model_fields]


def _likely_keys(place: str, *, root: type[BaseModel]) -> list[str]:
    """Return the key that is spelt most like ``place``; or the keys in other sections with such a last part."""
    keys = _all_keys(root)
    whole = difflib.get_close_matches(place, keys, n=1)
    if whole:
        return whole
    last = difflib.get_close_matches(place.rpartition(".")[2], {key.rpartition(".")[2] for key in keys}, n=1)
    return [key for key in keys if last and key.rpartition(".")[2] == last[0]]


def _all_keys(root: type[BaseModel]) -> list[str]:
    """Return every key, sections first, like ``train`` and ``train.steps``."""
    keys = []
    for name, field in root.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(f"{name}.{key}" for key in field.annotation.model_fields)
    return keys
