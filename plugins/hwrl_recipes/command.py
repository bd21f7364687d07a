"""``hwrl recipe``: write the files of a recipe, which are in the folder ``recipes`` beside this file.

A recipe is ``NAME.yaml`` there, with the files that its text names. Its first lines are comments: what it does, and the
commands that run it.
"""

from __future__ import annotations

import argparse
import os
import shlex
from importlib.resources import files
from pathlib import Path

from hwrl.cli import local_path
from hwrl.errors import ConfigError, did_you_mean

HELP = "list the recipes of whole runs, or write one: its configuration, data and reward"

_FOLDER = files("hwrl_recipes") / "recipes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", nargs="?", help="a recipe; without it, all are listed")
    parser.add_argument("directory", nargs="?", type=local_path, metavar="DIR", help="where to write its files")


def run(args: argparse.Namespace) -> int:
    """List the recipes, or write one."""
    if args.name is None:
        for name in names():
            print(f"{name:<12} {_head(name)[0]}")
    else:
        directory = Path(args.name) if args.directory is None else args.directory
        write(args.name, directory)
        print("\n".join([f"cd {shlex.quote(str(directory))}", *_head(args.name)[1:]]))
    return 0


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml"))


def write(name: str, directory: Path) -> None:
    """Write the recipe ``name`` to ``directory``. Raises ConfigError if it is unknown, or if a file is there."""
    if name not in names():
        raise ConfigError(
            f"there is no recipe {name!r}",
            why=f"the recipes are {', '.join(names())}",
            fix=did_you_mean(name, names(), otherwise="choose one of them"),
        )
    config = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    written = {"config.yaml": config}
    written |= {file.name: file.read_text(encoding="utf-8") for file in _FOLDER.iterdir() if file.name in config}
    if present := [file for file in written if os.path.lexists(directory / file)]:
        raise ConfigError(
            f"cannot write the recipe to {directory}",
            why=f"{', '.join(present)} exists there",
            fix=f"choose another folder: hwrl recipe {name} DIR",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in written.items():
            with (directory / file).open("x", encoding="utf-8") as created:  # through no link
                created.write(text)
    except OSError as exc:
        raise ConfigError(f"cannot write {directory}", why=str(exc), fix=f"hwrl recipe {name} DIR") from exc


def _head(name: str) -> list[str]:
    """Return the recipe's first lines, its comments: what it does, then commands."""
    lines = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
    return [line.removeprefix("#").strip() for line in head]
