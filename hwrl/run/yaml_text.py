"""YAML that people wrote: read with a limit on everything, and without a guess where it says two things."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

_MAX_NBYTES = 1 << 20
_MAX_VALUES = 10_000
"""In one document. Aliases count as often as they are used: some lines of them can stand for billions of values."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key that stands twice in one mapping; PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:  # `<<` can double the keys with every line
            raise yaml.MarkedYAMLError(problem="too many keys are merged", problem_mark=node.start_mark)


def read_file(path: Path) -> bytes:
    """Return the content of a regular file of at most 1 MiB; raise OSError if it is anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO would wait for a writer
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"it is no regular file: {path}")
        content = file.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        raise OSError(f"it has more than {_MAX_NBYTES:,} bytes: {path}")
    return content


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document; ValueError, with the line if there is one, for anything else."""
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:  # of a date, a number, a tag
        raise ValueError(f"it has a value that cannot be read: {exc}") from exc
    _require_few(tree)
    return tree


def _require_few(tree: Any) -> None:
    waiting, count = [tree], 0
    while waiting and count <= _MAX_VALUES:
        value = waiting.pop()
        count += 1
        if isinstance(value, (dict, list)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
    if count > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES:,} values, counted where aliases use them")
