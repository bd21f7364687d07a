"""The ``hwrl`` command. Each subcommand is a module with ``HELP``, ``configure(parser)`` and ``run(args)``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hwrl import __version__
from hwrl.errors import HwrlError, with_notes

COMMANDS = ("train", "doctor", "bench", "checkpoints", "conformance")
"""Names of the subcommands, and of the modules in this package; a module is imported only when it is asked for."""

_EXTRA_OF = dict.fromkeys(
    ["matplotlib", "pyarrow", "pydantic", "ray", "rich", "safetensors", "tensorboard", "transformers", "yaml"], "train"
) | {"peft": "lora", "pytest": "testing"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; return the exit status: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        status: int = args.run(args)
    except HwrlError as error:
        print(f"hwrl: {type(error).__name__}: {with_notes(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hwrl: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_OF:
            raise
        print(f"hwrl: this command needs {error.name}, which is not installed", file=sys.stderr)
        print(f"  fix: pip install 'hwrl[{_EXTRA_OF[error.name]}]'", file=sys.stderr)
        return 1
    return status


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; ``overrides``, where a command has them, may stand before and after its options."""
    parser = _parser(words)
    args, rest = parser.parse_known_args(words)
    if rest and ("overrides" not in args or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes positional arguments from one place only
        args.overrides = [*args.overrides, *rest]
    return args


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hwrl", description="Reinforcement learning on any accelerator.")
    parser.add_argument("--version", action="version", version=f"hwrl {__version__}")
    chosen = next((word for word in words if not word.startswith("-")), None)
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name in [chosen] if chosen in COMMANDS else COMMANDS:
        module = importlib.import_module(f"hwrl.cli.{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser
