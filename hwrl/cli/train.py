"""``hwrl train``: run a training pipeline from a configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hwrl.cli.arguments import local_path
from hwrl.errors import manual, with_notes
from hwrl.lazy import large_imports

HELP = "train a policy with asynchronous reinforcement learning"
_STATUS = (
    "Exit status: 0 all steps done and all goals reached; 1 a goal missed, or an error; 2 wrong usage; 130 interrupted."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _STATUS
    parser.add_argument("config", type=local_path, help=f"a YAML file; {manual('configuration.md')} lists the keys")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example train.steps=100 resume=true"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")


def run(args: argparse.Namespace) -> int:
    """Train; 0 only if all steps were done and all goals reached; 130 after Ctrl-C or SIGTERM."""
    from hwrl.run.interrupts import Interrupts

    with Interrupts():
        try:
            return _train(args)
        except KeyboardInterrupt as stop:
            advice = "resume=true continues from the last checkpoint, if there is one"
            print(f"hwrl: interrupted, and nothing more was saved; {advice}{with_notes(stop)}", file=sys.stderr)
            return 130


def _train(args: argparse.Namespace) -> int:
    from hwrl.run import dump_config, load_config

    config = load_config(args.config, args.overrides)
    if args.print_config:
        print(dump_config(config), end="")
        return 0
    from hwrl.hub import pin
    from hwrl.run.inputs import check_inputs

    sys.path.append(str(Path.cwd()))  # Ray's workers do it too: a reward function may be in a module of this directory
    config = config.with_models(pin)  # downloads here, once, where a terminal shows it
    check_inputs(config)
    with large_imports():
        from hwrl.run.loop import run_training  # imports torch and Ray, so only after the cheap checks
        from hwrl.run.report import make_view

    view = make_view(config.train.steps)
    summary = run_training(config, view)
    view.log(summary.text)
    if not summary.finished:
        return 130
    return 0 if summary.succeeded else 1
