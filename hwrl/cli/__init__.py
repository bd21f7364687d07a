"""The ``hwrl`` command: built-in subcommands, and those of plugins."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from hwrl import __version__
from hwrl.cli.arguments import count, local_path
from hwrl.cli.commands import Commands
from hwrl.errors import ConfigError, HwrlError, with_notes
from hwrl.output import discard, printable_output

__all__ = ["count", "local_path", "main"]

_EXTRA_OF = dict.fromkeys(["pyarrow", "pydantic", "ray", "safetensors", "transformers", "yaml"], "train") | {
    "peft": "lora",
    "pytest": "testing",
}
_IN_CLONE = {"bench": "plugins/hwrl_bench"}
"""Commands for developers, in packages of the repository that no wheel has."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; return the exit status: 0 success, 1 failure, 130 Ctrl-C, 141 a closed pipe.

    Help, ``--version`` and wrong usage raise SystemExit, with status 0, 0 and 2. Output that is lost is a failure.
    """
    with printable_output() as output:
        try:
            try:
                return _run(list(sys.argv[1:] if argv is None else argv))
            finally:
                output.finish()
        except OSError as error:
            if error is not output.lost:  # for example a name that is too long, or a directory without permission
                _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
                return 1
            discard(output)
            if isinstance(error, BrokenPipeError):  # the reader has what it wants: end as other programs do
                return 128 + signal.SIGPIPE
            _complain(f"the output cannot be written: {error.strerror}")
            return 1


def _run(words: Sequence[str]) -> int:
    try:
        args = parse(words)
        status: int = args.run(args)
    except HwrlError as error:
        _complain(f"{type(error).__name__}: {with_notes(error)}")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_OF:
            raise
        fix = f"pip install 'hwrl[{_EXTRA_OF[error.name]}]'"
        _complain(f"this command needs {error.name}, which is not installed\n  fix: {fix}")
        return 1
    return status


def _complain(text: str) -> None:
    with suppress(OSError):  # nobody can be told
        print(f"hwrl: {text}", file=sys.stderr)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. ``overrides`` of a command may stand before and after its options."""
    if not words:
        _parser(None).print_help(sys.stderr)
        raise SystemExit(2)
    _version_option().parse_known_args(list(takewhile(lambda word: word.startswith("-"), words)))
    parser = _parser(next((word for word in words if not word.startswith("-")), None))
    args, rest = parser.parse_known_args(words)
    if rest and ("overrides" not in args or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_advice(rest) if 'overrides' in args else ''}")
    if rest:  # argparse takes positional arguments from one place only
        args.overrides = [*args.overrides, *rest]
    return args


def _advice(unknown: Sequence[str]) -> str:
    """Return the advice for options that may be meant as settings, such as ``--train.steps=5`` and ``--resume``."""
    setting = next((word.lstrip("-") for word in unknown if word.startswith("--")), None)
    if setting is None:
        return ""
    return f"; a setting has no dashes: {setting if '=' in setting else f'{setting}=…, for example resume=true'}"


def _version_option() -> argparse.ArgumentParser:
    """Return a parser for ``--version`` alone: it answers without a plugin."""
    parser = argparse.ArgumentParser(prog="hwrl", add_help=False)
    parser.add_argument("--version", action="version", version=f"hwrl {__version__}")
    return parser


def _parser(name: str | None) -> argparse.ArgumentParser:
    """Return a parser for the command ``name``. If there is none, the parser has all commands, for help and errors.

    Failed plugins are reported on stderr.
    """
    commands = Commands()
    chosen = None if name is None else commands.find(name)
    if chosen is None and name in _IN_CLONE:
        raise ConfigError(
            f"hwrl {name} is not installed",
            why="it is for developers, and comes with a clone of hwrl's repository",
            fix=f"in the clone: pip install -e . -e {_IN_CLONE[name]}",
        )
    known = commands.all() if chosen is None else [chosen]
    for problem in commands.problems:
        _complain(problem)
    parser = argparse.ArgumentParser(
        prog="hwrl", description="Reinforcement learning on any accelerator.", parents=[_version_option()]
    )
    metavar = "{" + ",".join(command.name for command in known) + "}"
    subparsers = parser.add_subparsers(required=True, metavar=metavar)
    for command in known:
        listed = command.help.replace("%", "%%")  # argparse formats it
        subparser = subparsers.add_parser(command.name, help=listed, description=command.help)
        subparser.set_defaults(run=command.run)
    if chosen is not None:
        chosen.configure(subparser)
    return parser
