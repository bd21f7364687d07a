"""Check at run time the type of a value from foreign code."""

from __future__ import annotations

import reprlib
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def type_mismatch(value: object, kind: Any, *, name: str = "it") -> str:
    """Return the reason why ``value`` is not of type ``kind``, an empty text if it is; it calls the value ``name``.

    ``kind`` is ``Any``, a class, a dataclass with fields of these kinds, ``Literal``, a union, or ``tuple`` or ``dict``
    of these kinds. A bool is not an int.

    >>> type_mismatch({"PORT": 1}, dict[str, str])
    "it['PORT'] is 1, not of type str"
    """
    if kind is Any or _matches(value, kind):
        return ""
    for part, part_kind, part_name in _parts(value, kind, name):
        wrong = type_mismatch(part, part_kind, name=part_name)
        if wrong:
            return wrong
    return f"{name} is {reprlib.repr(value)}, not {_in_words(kind)}"


def _matches(value: object, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin in (Union, UnionType):
        return any(_matches(value, arg) for arg in args)
    if not _is_instance(value, origin or kind):
        return False
    if origin is tuple and args[-1] is not ... and len(value) != len(args):  # type: ignore[arg-type] # a tuple
        return False
    return not any(type_mismatch(part, part_kind) for part, part_kind, _ in _parts(value, kind, ""))


def _is_instance(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _parts(value: Any, kind: Any, name: str) -> list[tuple[object, Any, str]]:
    """Return the parts of ``value`` with types of their own, each with its type and its name."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # of "X | None", the reason for X says more
        others = [arg for arg in args if arg is not type(None)]
        return [(value, others[0], name)] if len(others) == 1 and value is not None else []
    if not isinstance(origin or kind, type) or not isinstance(value, origin or kind):
        return []
    if origin is dict:
        keys = [(key, args[0], f"a key of {name}") for key in value]
        return keys + [(item, args[1], f"{name}[{key!r}]") for key, item in value.items()]
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is ... else args[: len(value)]
        return [
            (part, part_kind, f"{name}[{index}]")
            for index, (part, part_kind) in enumerate(zip(value, kinds, strict=False))
        ]
    if is_dataclass(kind):
        return [(getattr(value, field, None), hint, field) for field, hint in get_type_hints(kind).items()]
    return []


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    return f"of type {kind.__name__}" if isinstance(kind, type) and not get_args(kind) else f"of type {kind}"
