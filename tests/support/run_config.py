"""The smallest configuration of a run, for tests of its keys and of its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hwrl.run.config import Config, load_config, parse_config

MINIMAL: dict[str, Any] = {
    "dir": "run",
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "reward": {"function": "m:f"},
}


def write_config(directory: Path, tree: object = MINIMAL, *, name: str = "config.yaml") -> Path:
    """Write ``tree`` to a file in ``directory``; return its path."""
    path = directory / name
    path.write_text(yaml.safe_dump(tree))
    return path


def load(directory: Path, *words: str) -> Config:
    """Return the configuration of a file in ``directory`` with ``MINIMAL`` and these overrides."""
    return load_config(write_config(directory), words)


def config_of(directory: Path | str = "run", **sections: Any) -> Config:
    """Return ``MINIMAL`` with this run directory, and with these keys or sections instead of its own."""
    return parse_config({**MINIMAL, "dir": directory, **sections})
