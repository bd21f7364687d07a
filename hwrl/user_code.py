"""Load a user's function by its import path: a reward, a loss, an advantage, a workflow, a curriculum."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from hwrl.errors import DataError, did_you_mean, message_of, short_repr

_loaded: dict[str, tuple[bytes, Any]] = {}
"""The modules made from sources, with their sources: two functions of one file share its module."""
_folders: list[str] = []
"""The folders of users' files that this module has put into ``sys.path``."""


def load_function(target: str, *, key: str, source: bytes | None = None) -> Callable[..., Any]:
    """Return the function at ``target``: ``package.module:function`` or ``path/to/file.py:function``.

    ``key`` is the configuration key with this target; errors name it. ``source`` replaces the content of the module's
    file, which may have changed since. Runs the module, once for each source. Raises DataError.

    A file can import those beside it: its folder is in ``sys.path`` from then on, behind all that is no user's folder.
    Processes that it starts find it under its module's name: that of the file, with those of folders if need be.

    >>> load_function("hwrl.run.demo:sort_reward", key="reward.function")("21>", "12", "12")["reward"]
    1.0
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise DataError(
            f"{key}={target} names no function",
            why="it must be package.module:function or path/file.py:function",
            fix=f"for example {key}=my_code.py:my_function",
        )
    module = _load_file(Path(place), key, source) if place.endswith(".py") else _load_module(place, key, source)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(
            f"there is no function {name!r} in {place}",
            why=f"{key}={target} names it",
            fix=_fix_for_name(module, name=name),
        )
    return function  # type: ignore[no-any-return] # the user's function; its caller checks the result


def function_file(target: str) -> Path | None:
    """Return the Python file of the function at ``target``, without running it; None if there is none."""
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def _fix_for_name(module: Any, *, name: str) -> str:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    return did_you_mean(name, functions, otherwise=f"define {name!r} there, or name another function")


def _load_module(name: str, key: str, source: bytes | None) -> Any:
    try:
        spec = None if source is None else importlib.util.find_spec(name)
        return importlib.import_module(name) if spec is None or source is None else _execute(spec, source)
    except ImportError as exc:
        raise DataError(
            f"the module {name} of {key} cannot be imported",
            why=message_of(exc),
            fix=f"install the missing module, or name a file: {key}=path/file.py:function",
        ) from exc
    except (Exception, SystemExit) as exc:
        raise _broken(name, key, exc) from exc


def _load_file(path: Path, key: str, source: bytes | None) -> Any:
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for good: children get this path, too
        _folders.append(folder)
    spec = importlib.util.spec_from_file_location(_importable_name(path.absolute()), path)
    if (source is None and not path.is_file()) or spec is None:
        raise DataError(f"there is no file {path}", why=f"{key} names it", fix="correct the path")
    try:
        with _imports_from(folder):
            return _execute(spec, path.read_bytes() if source is None else source)
    except (Exception, SystemExit) as exc:
        raise _broken(str(path), key, exc) from exc


@contextlib.contextmanager
def _imports_from(folder: str) -> Iterator[None]:
    """Let ``folder`` come first among the users' folders and the working directory at the end of ``sys.path``.

    Modules of other users' folders are forgotten if ``folder`` has files of their names: its file means those.
    """
    for name, module in list(sys.modules.items()):
        origin = os.path.dirname(getattr(getattr(module, "__spec__", None), "origin", None) or "")
        is_others = origin in _folders and origin != folder and name not in _loaded
        if is_others and (Path(folder) / f"{name}.py").is_file():
            del sys.modules[name]
    place = len(sys.path)
    while place and sys.path[place - 1] in (*_folders, str(Path.cwd())):
        place -= 1
    sys.path.insert(place, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file has set another path
            sys.path.remove(folder)


@functools.cache
def _importable_name(path: Path) -> str:
    """Return the name under which an import finds ``path``: its own, or with its folders if that is another module."""
    parts = path.with_suffix("").parts
    for start in range(len(parts) - 1, 0, -1):
        if not parts[start].isidentifier():
            break
        name, root = ".".join(parts[start:]), str(Path(*parts[:start]))
        added = root not in sys.path
        if added:
            sys.path.append(root)
        try:
            spec = importlib.util.find_spec(name)
        except Exception:  # noqa: BLE001 - a folder may be a package, whose code may raise anything
            spec = None
        if spec is not None and spec.origin is not None and Path(spec.origin) == path:
            return name
        if added:
            sys.path.remove(root)
    return f"hwrl_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # no import finds it


def _execute(spec: ModuleSpec, source: bytes) -> Any:
    """Return the module of ``spec`` with the code ``source``, importable under its name from now on."""
    known, module = _loaded.get(spec.name, (None, None))
    if known == source:
        return module
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    code = compile(source, str(spec.origin), "exec", dont_inherit=True)  # our __future__ imports are not the user's
    try:
        exec(code, vars(module))
    except BaseException:
        sys.modules.pop(spec.name, None)  # as an import does
        raise
    _loaded[spec.name] = source, module
    return module


def _broken(place: str, key: str, exc: BaseException) -> DataError:
    ends = isinstance(exc, SystemExit)
    return DataError(
        f"the code of {key} in {place} cannot be loaded",
        why=f"it {'ended the process' if ends else 'raised'}: {short_repr(exc)}",
        fix="put the script's own work under `if __name__ == '__main__':`" if ends else "fix the error in the reason",
    )
