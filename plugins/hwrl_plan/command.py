"""``hwrl plan``: the memory and the traffic of a run, from its configuration alone."""

from __future__ import annotations

import argparse
import functools
import math
import re

from hwrl.cli import count, local_path
from hwrl.errors import ConfigError, manual
from hwrl.lazy import large_imports

HELP = "tell the memory and the traffic of a run by cause, and settings that fit, without a device"

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(["K", "M", "G", "T"], 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(["K", "M", "G", "T"], 1)},
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "config", type=local_path, help=f"a YAML file of hwrl train; {manual('plan.md')} explains the result"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="for example train.ranks=8")
    parser.add_argument("--devices", type=count, required=True, help="devices of all nodes")
    parser.add_argument("--memory", type=size, required=True, help="memory of a device, for example 80GiB")
    parser.add_argument("--nodes", type=count, default=1, help="equal nodes that have the devices")
    parser.add_argument("--host-memory", type=size, help="host memory of a node, for example 1TiB")
    parser.add_argument("--bandwidth", type=_rate, default=50e9, help="of each link, for example 50GB/s")
    parser.add_argument(
        "--group-memory", type=size, default=0, help="device memory of each group of processes, for example 400MiB"
    )
    parser.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if the run fits, 1 if not."""
    from hwrl.hub import model_directory
    from hwrl.run import load_config

    config = load_config(args.config, args.overrides).with_models(functools.partial(model_directory, weights=False))
    with large_imports():
        from hwrl_plan.levers import suggest
        from hwrl_plan.planning import Hardware, make_plan
        from hwrl_plan.text import plan_as_json, plan_as_text

    if args.devices % args.nodes:
        raise ConfigError(
            f"--devices={args.devices} and --nodes={args.nodes} do not go together",
            why="all nodes have the same number of devices",
            fix=f"give a multiple of {args.nodes} devices, or plan for the nodes that are alike",
        )
    hardware = Hardware(args.devices, args.memory, args.nodes, args.host_memory, args.bandwidth, args.group_memory)
    plan = make_plan(config, hardware)
    suggestions = [] if plan.fits else suggest(config, hardware)
    print(plan_as_json(plan, suggestions) if args.json else plan_as_text(plan, suggestions))
    return 0 if plan.fits else 1


def size(text: str) -> int:
    """Return the bytes of a size like ``80GiB``, ``80GB`` or ``1024``. Raises argparse's error.

    >>> size("80GiB"), size("1.5 GB")
    (85899345920, 1500000000)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    nbytes = float(found[1]) * _UNITS[found[2]] if found is not None and found[2] in _UNITS else 0.0
    if not 1 <= nbytes < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; write for example 80GiB, or 50GB/s for a rate"
        )
    return int(nbytes)


def _rate(text: str) -> float:
    return float(size(text.strip().removesuffix("/s")))
