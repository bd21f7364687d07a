"""``hwrl simulate``: the speed of a run on other numbers of devices, from a real run's metrics and assumptions."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from hwrl.cli import count, local_path
from hwrl.errors import manual
from hwrl.lazy import large_imports

_MOST_DEVICES = 100_000
"""The time grows with their number: a simulation of so many takes seconds to minutes."""
HELP = "tell throughput, idle time and staleness of a run on up to 10,000 devices, without them"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    page = manual("simulate.md")
    parser.add_argument("config", type=local_path, help=f"a YAML file of hwrl train; {page} explains the result")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="for example train.ranks=8")
    parser.add_argument("--devices", type=_sizes, required=True, help="numbers of devices, for example 8,64,10000")
    parser.add_argument(
        "--metrics",
        type=local_path,
        metavar="FILE",
        help="a run of this configuration: its directory, or its metrics.jsonl",
    )
    parser.add_argument(
        "--assume", action="append", default=[], metavar="NAME=NUMBER", help="replace a cost, for example sigma=1.2"
    )
    parser.add_argument("--steps", type=count, default=20, help="training steps to simulate")
    parser.add_argument("--fixed-batch", action="store_true", help="do not let the groups of a step grow with devices")
    parser.add_argument("--beside-sync", action="store_true", help="simulate synchronous training, too, and compare")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of lengths and failures")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print a row for each number of devices, and the assumptions; 0 on success."""
    from hwrl.run import load_config

    config = load_config(args.config, args.overrides)
    with large_imports():
        from hwrl_simulate import text
        from hwrl_simulate.calibration import calibrate, read_run
        from hwrl_simulate.simulation import simulate
        from hwrl_simulate.size import scaled, synchronous
        from hwrl_simulate.workload import Workload, assume

    workload, sources = Workload(), {}
    if args.metrics is not None:
        measured = calibrate(config, read_run(args.metrics), assume(workload, args.assume))
        sources = {name: "measured" for name in vars(measured) if vars(measured)[name] != vars(workload)[name]}
        workload = measured
    workload = assume(workload, args.assume)
    sources |= {word.partition("=")[0]: "--assume" for word in args.assume}
    rows: list[dict[str, float]] = []
    tell = partial(print, file=sys.stderr)
    if not args.json:
        print(text.table_head(beside_sync=args.beside_sync), flush=True)
    for devices in args.devices:
        size = scaled(config, devices, steps=args.steps, fixed_batch=args.fixed_batch)
        result = simulate(size, workload, seed=args.seed, log=tell)
        baseline = simulate(synchronous(size), workload, seed=args.seed, log=tell) if args.beside_sync else None
        rows.append(text.result_of(result, baseline))
        if not args.json:
            print(text.table_row(rows[-1]), flush=True)  # the next one may take minutes
        if (sentence := text.limits_exceeded(result)) is not None:
            print(sentence, file=sys.stderr)
    print(text.as_json(rows, workload, sources) if args.json else f"\n{text.assumptions(workload, sources)}")
    return 0


def _sizes(text: str) -> list[int]:
    sizes = [count(word) for word in text.split(",")]
    if min(sizes) < 2 or max(sizes) > _MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"a simulated run has 2 to {_MOST_DEVICES:,} devices")
    return sizes


def _seed(text: str) -> int:
    if (seed := int(text)) < 0:
        raise ValueError
    return seed
