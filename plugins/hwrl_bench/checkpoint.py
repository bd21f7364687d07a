"""``hwrl bench checkpoint``: the cost of an asynchronous save for the trainer, beside other packages' ways to save."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hwrl import get_backend
from hwrl.errors import HwrlError
from hwrl_bench.arguments import add_json, folder, positive_float, positive_int, seconds
from hwrl_bench.checkpoint_process import SaveProcess
from hwrl_bench.checkpoint_ways import WAYS, SaveWorkload
from hwrl_bench.result import machine_line, provenance, report, unmeasured_lines
from hwrl_bench.ways import BenchPlan

HELP = "asynchronous saves against torch's and megatron-core's: time blocked, the next step, host memory"

_MEASURED = ("raw_s", "step_s", "blocked_s", "next_step_s", "complete_s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--gib", type=positive_float, default=0.3, help="the state, GiB: parameters are a third, the rest AdamW's"
    )
    parser.add_argument("--rounds", type=positive_int, default=3, help="measurements of each way (default 3)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"of: {', '.join(WAYS)}"
    )
    parser.add_argument(
        "--offload", choices=("none", "optimizer", "all"), default="none", help="what is on the host (default none)"
    )
    parser.add_argument(
        "--staging", choices=("host", "device"), default="host", help="where hwrl copies what is not (default host)"
    )
    parser.add_argument("--tokens", type=positive_int, default=2048, help="tokens of a training step (default 2048)")
    parser.add_argument("--rollout-s", type=seconds, default=0.0, help="idle seconds between save and step (default 0)")
    parser.add_argument("--dir", type=folder, help="where to save, on a disk or tmpfs (default: for temporary files)")
    parser.add_argument("--timeout", type=positive_float, default=75.0, help="seconds for all of one way (default 75)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each way in its own process, print a table, write the JSON; fail if hwrl could not be measured."""
    plan = BenchPlan(tuple(args.ways), args.rounds)
    ways = plan.one_by_one(lambda name: _measure(name, plan, args))
    result = {
        "benchmark": "checkpoint",
        "offload": args.offload,
        "staging": args.staging,
        "rollout_s": args.rollout_s,
        "ways": ways,
        "device": get_backend().info.description,
        **provenance("torch"),
    }
    report(result, _table(result), json_path=args.json)
    return 1 if "why_not" in ways.get("hwrl", {}) else 0


# -- one way -------------------------------------------------------------------------------------------------------


def _measure(name: str, plan: BenchPlan, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one way, or the reason why there are none."""
    why_not = WAYS[name].why_not() or (WAYS[name].why_not_offloaded if args.offload != "none" else None)
    if why_not:
        return {"why_not": why_not}
    nbytes = int(args.gib * (1 << 30))
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="hwrl-bench-") as directory:
        workload = SaveWorkload(nbytes, args.offload, args.tokens, args.rollout_s, args.staging, Path(directory))
        return _measure_in_process(name, workload, plan, timeout_s=args.timeout)


def _measure_in_process(name: str, workload: SaveWorkload, plan: BenchPlan, *, timeout_s: float) -> dict[str, Any]:
    """Measure one way. If the time is over before the last round, return the rounds until then."""
    rows: list[dict[str, float]] = []
    try:
        with SaveProcess(name, workload, timeout_s=timeout_s) as process:
            payload = process.receive()
            with process.memory() as alone:
                process.request("step")
            with process.memory() as saving:
                process.request("save")
            while len(rows) < plan.rounds:
                rows.append(process.request("measure"))
    except HwrlError as exc:
        if not rows:
            return {"why_not": exc.why}
    extra = {f"extra_{key}": saving[key] - alone[key] for key in alone}
    return {**payload, **extra, **_summary(rows)}


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    medians = {f"{name}_median": statistics.median(row[name] for row in rows) for name in _MEASURED}
    return {
        **medians,
        "blocked_of_raw": medians["blocked_s_median"] / medians["raw_s_median"],
        "next_step_of_step": medians["next_step_s_median"] / medians["step_s_median"],
        "rounds": rows,
    }


# -- the result ----------------------------------------------------------------------------------------------------


def _table(result: dict[str, Any]) -> str:
    measured = {name: row for name, row in result["ways"].items() if "why_not" not in row}
    lines = [machine_line(result)]
    for row in list(measured.values())[:1]:
        size, staged = row["payload_nbytes"] / 1e6, row["staged_nbytes"] / 1e6
        lines.append(f"parameters and AdamW state: {size:.0f} MB, {staged:.0f} MB of it on the device")
        lines.append(f"hwrl copies that to the {result['staging']}'s memory before its save returns")
    lines.append(
        f"{'way':<20}{'raw ms':>10}{'blocked ms':>12}{'of raw':>8}{'step ms':>10}{'next ms':>10}{'ratio':>7}"
        f"{'saved s':>9}{'extra MB':>10}{'rounds':>8}"
    )
    for name, row in measured.items():
        raw, blocked, step, after = (row[f"{key}_s_median"] * 1e3 for key in ("raw", "blocked", "step", "next_step"))
        times = f"{raw:>10.1f}{blocked:>12.1f}{row['blocked_of_raw']:>8.2f}{step:>10.1f}{after:>10.1f}"
        rest = f"{row['next_step_of_step']:>7.2f}{row['complete_s_median']:>9.2f}"
        lines.append(f"{name:<20}{times}{rest}{row['extra_held_nbytes'] / 1e6:>10.0f}{len(row['rounds']):>8}")
    lines += unmeasured_lines(result["ways"])
    lines.append(
        "raw: the bytes on the device copied to pinned memory at once; extra: host memory of all its processes"
    )
    return "\n".join(lines)
