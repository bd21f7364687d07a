"""Read a configuration from YAML and ``key=value`` overrides, and write it back."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hwrl.errors import ConfigError, manual
from hwrl.files import read_file
from hwrl.run.config.explain import explain, keys_in
from hwrl.run.config.schema import Config
from hwrl.run.config.yaml_reader import MAX_NBYTES, parse_yaml, write_yaml

RUN_CONFIG = "config.yaml"
"""The file in a run directory with the run's configuration. It begins with RUN_HEADER."""
RUN_HEADER = b"# The configuration of the run in this directory; hwrl train writes it anew.\n"
"""The first line of RUN_CONFIG. hwrl overwrites only a file that begins with it, so the text must not change."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file ``path``, apply the ``key.subkey=value`` overrides in order, and validate the result.

    The values in overrides are YAML. Relative paths in the file and in overrides are relative to the working directory.
    The ``config.yaml`` of a run directory contains no ``dir``: the directory of the file is used. Raises ConfigError.
    """
    if not path.is_file() and "=" in path.name:
        raise ConfigError(f"{str(path)!r} is not a file", why="it looks like a setting", fix="name the YAML file first")
    try:
        content = read_file(path, max_nbytes=MAX_NBYTES, follow_links=True)
        tree = parse_yaml(content.decode("utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}", why=str(exc), fix=_fix_of_path(path)) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not text in UTF-8", why=str(exc), fix="save it as UTF-8") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not usable YAML", why=str(exc), fix="correct the file") from exc
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} contains no sections",
            why=f"its content is a {type(tree).__name__}",
            fix="write 'dir: …', 'model: {path: …}', …",
        )
    if path.name == RUN_CONFIG and content.startswith(RUN_HEADER):
        tree.setdefault("dir", str(path.parent.absolute()))
    for word in overrides:
        _override(tree, word)
    return parse_config(tree)


def _fix_of_path(path: Path) -> str:
    inside = [file for name in (RUN_CONFIG, f"run/{RUN_CONFIG}") if (file := path / name).is_file()]
    if inside:
        return f"did you mean {inside[0]}?"
    names = [file.name for file in path.parent.glob("*.yaml") if file.name != path.name] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else "name a YAML file"


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate ``tree``. Raises ConfigError with all mistakes, and with suggestions for unknown keys."""
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        mistakes = explain(exc.errors(include_url=False), root=Config)
        raise ConfigError(
            f"the configuration has {len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}",
            why="\n       ".join(mistakes),
            fix=f"{manual('configuration.md')} lists every key with its default",
        ) from exc


def dump_config(config: Config) -> str:
    """Return ``config`` as YAML with every key. :func:`load_config` reads it back."""
    return write_yaml(config.model_dump(mode="json"))


def dump_run_config(config: Config) -> bytes:
    """Return the content of a run directory's ``config.yaml``.

    It contains no ``dir``, so that the directory may be moved, and no ``resume``.
    """
    return RUN_HEADER + write_yaml(config.model_dump(mode="json", exclude={"dir", "resume"})).encode()


def _override(tree: dict[str, Any], word: str) -> None:
    key, separator, text = word.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"{word!r} is not an override", why="it must be key=value", fix="for example train.steps=100")
    try:
        value = parse_yaml(text)
    except ValueError as exc:
        raise ConfigError(f"the value in {word!r} cannot be read", why=str(exc), fix="quote it") from exc
    for depth, part in enumerate(parts[:-1], start=1):
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise _not_a_section(word, key=".".join(parts[:depth]), value=child)
        tree = child
    tree[parts[-1]] = value


def _not_a_section(word: str, *, key: str, value: object) -> ConfigError:
    keys = keys_in(key, root=Config)
    fix = f"make {key} a section in the file, with keys like {keys[0]}" if keys else f"set {key}=… itself"
    return ConfigError(
        f"{word!r} cannot be applied", why=f"{key} has the value {value!r}, it is not a section", fix=fix
    )
