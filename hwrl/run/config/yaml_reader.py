"""Read YAML that a person has written, with limits on size and depth. Write YAML that reads back the same."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

MAX_NBYTES = 1 << 20
"""Maximum size of a file."""
_MAX_VALUES = 10_000
"""Maximum number of values in a document. Each use of an alias counts: a few lines can expand to billions of values."""
_FLOAT, _INT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
_MORE_FLOATS = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$|[-+]\.[0-9][0-9_]*$")
"""Numbers that PyYAML reads as texts, because it reads YAML 1.1. In YAML 1.2 they are numbers."""
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")
"""Numbers that are octal for PyYAML. In YAML 1.2 they are decimal."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, with the floats of YAML 1.2. PyYAML's own reads ``1:30`` as 90; here it is a text.

    A duplicate key in a mapping is an error. PyYAML would use the last one. So is an integer with a leading zero.
    """

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return the number, or the text if it has a colon or is like a hash: ``12e4567`` is no finite number."""
        if _LEADING_ZERO.match(node.value):
            problem = f"{node.value!r} has a leading zero: remove it, or quote a text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if ":" in node.value:
            return node.value
        number = self.construct_yaml_int(node) if node.tag == _INT else self.construct_yaml_float(node)
        return node.value if math.isinf(number) and _MORE_FLOATS.match(node.value) else number

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


class _Dumper(yaml.SafeDumper):
    """YAML's safe dumper, which quotes a text that is a number for :class:`_Loader` or for PyYAML."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _MORE_FLOATS, list("-+.0123456789"))
    _kind.add_implicit_resolver(_INT, _LEADING_ZERO, list("-+0"))
for _tag in (_FLOAT, _INT):
    _Loader.add_constructor(_tag, _Loader.construct_number)


def write_yaml(tree: Any) -> str:
    """Return ``tree`` as YAML, with its keys in order. :func:`parse_yaml` returns the same value."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    return text


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises ValueError, with the line number if there is one.

    Each use of an alias is a copy, so a change of one does not change another.
    """
    try:
        tree = yaml.load(text, Loader=_Loader)
        _check_count(tree)
        return _copy(tree)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:  # from a date, a number or a tag
        raise ValueError(f"a value cannot be read: {exc}") from exc


def _copy(value: Any) -> Any:
    """Return a copy of ``value``, for which :func:`_check_count` has found no cycle."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _check_count(tree: Any) -> None:
    waiting, count = [tree], 0
    while waiting and count <= _MAX_VALUES:
        value = waiting.pop()
        count += 1
        if isinstance(value, (dict, list)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
    if count > _MAX_VALUES:
        raise yaml.YAMLError(f"it has more than {_MAX_VALUES:,} values, with each use of an alias counted")
