"""Write a package for a new backend, engine or transport, from the templates beside this file.

A template is a file with a name in ``.template``. ``MODULE`` in its path stands for the module's name; ``$name`` and
the other fields of :func:`_fields` stand for their values in its text.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from hwrl import __version__
from hwrl.cli import local_path
from hwrl.errors import ConfigError
from hwrl.interfaces import API_VERSION, Command
from hwrl.testing import Kind, Level, installed_names

_NAME = re.compile("[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_LONGEST = 40
_SUFFIX = ".template"
_EVERY = "every"
_GROUPS = {Kind.BACKEND: "hwrl.backends", Kind.TRANSPORT: "hwrl.transports"}
_LEVELS = {Kind.BACKEND: Level.DEVICE, Kind.TRAIN_ENGINE: Level.TRAIN}


def new_package_command(name: str, *kinds: Kind) -> Command:
    """Return the command ``name``, which writes a package of one of ``kinds``; ``--kind`` chooses among several."""
    choices = {kind.value.removesuffix("-engine"): kind for kind in kinds}
    noun = " or ".join(choices) + " engine" * (len(kinds) > 1)

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="its name in hwrl, like acme; the package is hwrl-NAME")
        parser.add_argument("--into", type=local_path, default=Path(), metavar="DIR", help="where to make its folder")
        if len(kinds) > 1:
            first = next(iter(choices))
            parser.add_argument("--kind", choices=choices, default=first, help=f"what it does ({first})")

    def run(args: argparse.Namespace) -> int:
        kind = choices[args.kind] if len(kinds) > 1 else kinds[0]
        print(next_steps(kind, args.name, write_package(kind, args.name, args.into)))
        return 0

    return Command(name, f"write a package with a new {noun}, ready to install and to change", configure, run)


def write_package(kind: Kind, name: str, into: Path) -> Path:
    """Write the package hwrl-``name`` into the folder ``into``, and return its path.

    Raises ConfigError if the name is malformed, if an installed package has it, or if the path exists.
    """
    _check_name(kind, name)
    folder = into / f"hwrl-{name}"
    fields = _fields(kind, name)
    written = {path: Template(text).substitute(fields) for path, text in _templates(kind, fields["module"])}
    try:
        folder.mkdir(parents=True)
        for path, text in written.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError as exc:
        raise ConfigError(
            f"cannot write {folder}", why=f"{exc.filename} exists", fix="choose another name, or another folder: --into"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot write {folder}", why=str(exc), fix="choose another folder: --into DIR") from exc
    return folder


def next_steps(kind: Kind, name: str, folder: Path) -> str:
    """Return the commands to try for the new package."""
    backend = f"HWRL_BACKEND={name} " if kind is Kind.BACKEND else ""
    level = _LEVELS.get(kind, Level.ROLLOUT)
    return (
        f"{folder} is a package that works. Try it, then read its README.md:\n"
        f"  pip install -e {folder}\n"
        f"  {backend}hwrl conformance {name} --level {level}"
    )


def _check_name(kind: Kind, name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"{name!r} cannot be the name of a {kind}",
            why=f"a name has lowercase letters and digits, a letter first, in parts joined by '-' or '_'; at most "
            f"{_LONGEST} characters",
            fix="choose a name like acme or acme-x2",
        )
    taken = [one for one in installed_names(kind) if one.replace("-", "_") == name.replace("-", "_")]
    if taken:
        raise ConfigError(
            f"{name!r} cannot be the name of a new {kind}",
            why=f"a {kind} {taken[0]!r} is installed",
            fix="choose another name",
        )
    module = _module_of(name)
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(
            f"{name!r} cannot be the name of a new {kind}",
            why=f"a package {module} is installed, and pip would overwrite it with the new one",
            fix="choose another name",
        )


def _module_of(name: str) -> str:
    return f"hwrl_{name.replace('-', '_')}"


def _fields(kind: Kind, name: str) -> dict[str, str]:
    plain = name.replace("-", "_")
    title = " ".join(part.capitalize() for part in plain.split("_"))
    module = _module_of(name)
    return {
        "name": name,
        "module": module,
        "title": title,
        "class_name": title.replace(" ", ""),
        "env": plain.upper(),
        "device_type": plain,
        "extension": f"torch_{plain}",
        "description": f"The {kind.value.replace('-', ' ')} {name} for hwrl",
        "kind": kind.value,
        "group": _GROUPS.get(kind, "hwrl.plugins"),
        "value": f"{module}:TRANSPORT" if kind is Kind.TRANSPORT else module,
        "level": _LEVELS.get(kind, Level.ROLLOUT).value,
        "backend": name if kind is Kind.BACKEND else "cpu",
        "api": str(API_VERSION),
        "api_dotted": ".".join(map(str, API_VERSION)),
        "version": __version__,
    }


def _templates(kind: Kind, module: str) -> Iterator[tuple[Path, str]]:
    """Yield the path inside the package and the text of each template of ``kind``."""
    root = files("hwrl_new") / "templates"
    for part in (_EVERY, kind.value):
        for path, file in _files(root / part, Path()):
            text = file.read_text(encoding="utf-8")
            yield Path(*(module if one == "MODULE" else one for one in path.parts)).with_suffix(""), text


def _files(folder: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, path / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield path / entry.name, entry
