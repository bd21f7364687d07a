"""A subcommand of ``hwrl``: built in, or added by a plugin through the hook ``hwrl_commands``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand. ``hwrl --help`` imports it and shows ``name`` and ``help``: keep torch out of its module.
    ``name`` is letters, digits, ``-``, ``_`` and ``.``, and begins with a letter or digit.

    ``configure`` adds the arguments to the subcommand's parser. ``run`` gets the parsed arguments, does the work and
    returns the exit status: 0 for success. Import torch and other heavy packages inside ``run``. An HwrlError from
    ``run`` becomes a message and the status 1, KeyboardInterrupt the status 130.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
