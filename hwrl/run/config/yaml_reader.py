"""Read YAML that a person has written: with limits on size and depth, and with an error for a duplicate key."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

_MAX_NBYTES = 1 << 20
_MAX_VALUES = 10_000
"""Maximum number of values in a document. Each use of an alias counts: a few lines can expand to billions of values."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, with an error for a duplicate key in a mapping. PyYAML would use the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_VALUES:  # each `<<` can double the number of keys
            raise yaml.MarkedYAMLError(problem="too many keys are merged", problem_mark=node.start_mark)


def read_file(path: Path) -> bytes:
    """Return the content of ``path``. Raises OSError unless it is a regular file of at most 1 MiB."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would otherwise wait for a writer
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"it is not a regular file: {path}")
        content = file.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        raise OSError(f"it has more than {_MAX_NBYTES:,} bytes: {path}")
    return content


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises ValueError, with the line number if there is one."""
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:  # from a date, a number or a tag
        raise ValueError(f"a value cannot be read: {exc}") from exc
    _check_count(tree)
    return tree


def _check_count(tree: Any) -> None:
    waiting, count = [tree], 0
    while waiting and count <= _MAX_VALUES:
        value = waiting.pop()
        count += 1
        if isinstance(value, (dict, list)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
    if count > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES:,} values, with each use of an alias counted")
