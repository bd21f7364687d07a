"""The base class of all sections of the configuration, and types with bounds for their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from hwrl.errors import did_you_mean
from hwrl.files import local_path
from hwrl.hub import is_on_hub, model_name

_LARGEST_INT = (1 << 31) - 1
_LARGEST_REAL = 1e9


class Section(BaseModel):
    """A section of the configuration. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


_FILE_FUNCTION = re.compile(r".*\.py:[A-Za-z_]\w*")


def _check_no_boolean(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would convert it to 1 or 0
        raise ValueError("Input should be a number, not true or false")
    return value


def _check_path(value: Any) -> Any:
    if not isinstance(value, str | Path) or value == "" or "\0" in str(value):  # empty: the working directory
        raise ValueError("Input should be a path, not an empty text and without a NUL character")
    return value


def _make_absolute(value: Any) -> Any:
    """Return the absolute path of a text, in which ``~`` may be the home directory."""
    return local_path(str(_check_path(value))).absolute()


def _check_finite(value: Any) -> Any:
    """Return ``value``. Raises ValueError if it contains, at any depth, a number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("Input should contain only finite numbers")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_finite(inner)
    return value


def _check_layers(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if not value or (isinstance(value, tuple) and not all(value)):
        raise ValueError("Input should name layers; it is empty or has an empty name")
    try:
        re.compile(value if isinstance(value, str) else "")
    except re.error as exc:
        raise ValueError(f"Input should be all-linear, a list of names, or a regular expression: {exc}") from exc
    return value


def _check_kept(value: int) -> int:
    if value == 0:
        raise ValueError("Input should be a number of tokens to keep, or -1 for all")
    return value


def _make_file_absolute(target: str) -> str:
    place, colon, name = target.rpartition(":")
    return f"{_make_absolute(place)}{colon}{name}" if place.endswith(".py") else target


def functions_in(options: JsonValue, key: str) -> dict[str, str]:
    """Return the users' functions (``file.py:function``) that ``options`` name, each with its key below ``key``.

    >>> functions_in({"tools": ["a.py:f", "package:g"], "size": 3}, "options")
    {'options.tools.0': 'a.py:f'}
    """
    if isinstance(options, str):
        return {key: options} if _FILE_FUNCTION.fullmatch(options) else {}
    items = options.items() if isinstance(options, dict) else enumerate(options) if isinstance(options, list) else ()
    return {name: target for part, value in items for name, target in functions_in(value, f"{key}.{part}").items()}


def _make_files_absolute(options: JsonValue) -> JsonValue:
    if isinstance(options, str):
        return _make_file_absolute(options) if _FILE_FUNCTION.fullmatch(options) else options
    if isinstance(options, dict):
        return {name: _make_files_absolute(value) for name, value in options.items()}
    return [_make_files_absolute(value) for value in options] if isinstance(options, list) else options


def is_template(value: str) -> bool:
    """Return whether ``value`` is the text of a chat template. Otherwise it is the path of a file."""
    return "{" in value


def _make_template_file_absolute(value: str) -> str:
    return value if is_template(value) else str(_make_absolute(value))


def _check_temperature(value: float) -> float:
    if 0 < value < 0.01:
        raise ValueError("Input should be 0 or at least 0.01")
    return value


def _make_path_absolute(value: Any) -> Any:
    return value if isinstance(value, str | Path) and is_on_hub(value) else _make_absolute(value)


def _make_model_path(value: Any) -> Any:
    return (model_name(str(value)) if isinstance(value, str | Path) else None) or _make_absolute(value)


def built_in_or_function(names: Sequence[str], elsewhere: Mapping[str, str]) -> Callable[[str], str]:
    """Return a validator: it accepts a text that is one of ``names``, or names a function of the user.

    ``elsewhere`` tells what to set for some names that are values of another key.
    """

    def check(value: str) -> str:
        if value in names or ":" in value:
            return value
        if value in elsewhere:
            raise ValueError(elsewhere[value])
        advice = f"Input should be {', '.join(names)}, package.module:function or file.py:function"
        raise ValueError(", ".join(filter(None, [advice, did_you_mean(value, names)])))

    return check


_NUMBER = BeforeValidator(_check_no_boolean)

Positive = Annotated[int, Field(gt=0, le=_LARGEST_INT), _NUMBER]
NotNegative = Annotated[int, Field(ge=0, le=_LARGEST_INT), _NUMBER]
MOST_PROCESSES = 4096
"""The maximum number of processes of one kind in a run."""
ProcessCount = Annotated[int, Field(gt=0, le=MOST_PROCESSES), _NUMBER]
Threads = Annotated[int, Field(gt=0, le=1024), _NUMBER]
"""Threads of one process. Operating systems refuse tens of thousands."""
Mebibytes = Annotated[int, Field(gt=0, le=1 << 20), _NUMBER]
Seed = NotNegative
"""Random number generators refuse negative seeds."""

Finite = Annotated[float, Field(ge=-1e15, le=1e15, allow_inf_nan=False), _NUMBER]
PositiveReal = Annotated[float, Field(gt=0, le=_LARGEST_REAL, allow_inf_nan=False), _NUMBER]
NotNegativeReal = Annotated[float, Field(ge=0, le=_LARGEST_REAL, allow_inf_nan=False), _NUMBER]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _NUMBER]
"""A decay rate of AdamW, which divides by 1 - decay."""
Temperature = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False), _NUMBER]
"""Some engines replace a temperature below 0.01 by 0.01. The trainer would then compute with a different one."""
EvalTemperature = Annotated[
    float, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_check_temperature), _NUMBER
]
"""A temperature like Temperature, or 0 for greedy decoding."""
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _NUMBER]
TopK = Annotated[int, Field(ge=-1, le=_LARGEST_INT), _NUMBER, AfterValidator(_check_kept)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, le=_LARGEST_INT), _NUMBER], ...], Field(max_length=1000)]
Seconds = Annotated[float, Field(ge=0.1, le=1e7, allow_inf_nan=False), _NUMBER]
"""A time limit. A process on a busy machine may need 0.1 s for any answer; 1e7 s are 115 days."""

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Texts = Annotated[tuple[Name, ...], Field(max_length=100)]
Template = Annotated[
    str, Field(min_length=1), BeforeValidator(_check_path), AfterValidator(_make_template_file_absolute)
]
"""The text of a Jinja template, or the path of its file."""
Layers = Annotated[str | tuple[str, ...], AfterValidator(_check_layers)]
DataName = Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]
"""The name of a data set. It becomes part of the names of metrics."""
AbsolutePath = Annotated[Path, BeforeValidator(_make_absolute)]
"""A path. A relative path is made absolute at once, because other processes may have another working directory."""
DataPath = Annotated[Path, BeforeValidator(_make_path_absolute)]
"""An AbsolutePath, or the name of a data set on the hub, which begins with ``hf:``."""
ModelPath = Annotated[Path, BeforeValidator(_make_model_path)]
"""An AbsolutePath of a model's directory, or the name of a model on the hub: it begins with ``hf:`` from here on."""
Function = Annotated[Name, AfterValidator(_make_file_absolute)]
"""A user's function: ``package.module:function`` or ``file.py:function``. The file's path is made absolute."""
Options = Annotated[dict[Name, JsonValue], AfterValidator(_check_finite)]
"""Settings of a plugin. The plugin checks them."""
UserOptions = Annotated[Options, AfterValidator(_make_files_absolute)]
"""Arguments of a user's function. A relative path in ``file.py:function`` is made absolute."""
