"""``hwrl bench train``: an optimizer step over ragged rows, beside plain torch over even rows."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwrl_bench.arguments import add_json, positive_float, positive_int
from hwrl_bench.models import MODELS
from hwrl_bench.result import machine_line, provenance, unmeasured_lines, write
from hwrl_bench.train_process import WAYS, TrainSetup, TrainWorkload, default_tokens, measure
from hwrl_bench.train_rows import RaggedRows
from hwrl_bench.ways import BenchPlan, one_line

HELP = "an optimizer step over rows of different lengths, against plain torch over rows of one length"

_ROWS = {
    "tiny": RaggedRows(8, mean=48, longest=256, prompt=16),
    "0.6b": RaggedRows(128),
    "1.7b": RaggedRows(128),
    "4b": RaggedRows(96),
}
_DEFAULT_WAYS = ("hwrl", "reference compiled")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny", help="size of the model (default tiny)")
    parser.add_argument(
        "--ways",
        nargs="+",
        type=_way,
        default=[(name, None) for name in _DEFAULT_WAYS],
        metavar="WAY[@TOKENS]",
        help=f"of: {', '.join(WAYS)}; TOKENS instead of --micro-batch-tokens (default: {', '.join(_DEFAULT_WAYS)})",
    )
    parser.add_argument("--rounds", type=positive_int, default=3, help="measured steps, after one (default 3)")
    parser.add_argument(
        "--micro-batch-tokens",
        type=positive_int,
        metavar="TOKENS",
        help="of a pass (default: hwrl's own, for references 16384 with checkpointing and 8192 without)",
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=positive_int,
        default=[1],
        metavar="N",
        help="devices of hwrl's engine, each with all the rows; `1 2` compares them (default 1)",
    )
    parser.add_argument("--rows", type=positive_int, help="rows of a step (default: 128 for 1.7b, 96 for 4b)")
    parser.add_argument(
        "--mean", type=positive_int, metavar="TOKENS", help="mean length of a response (default: about 1030; tiny 48)"
    )
    parser.add_argument(
        "--longest", type=positive_int, metavar="TOKENS", help="of a row (default: in the same relation to the mean)"
    )
    parser.add_argument(
        "--new-lengths",
        action="store_true",
        help="other lengths in each step of hwrl's ways: new shapes to compile for",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of forward and backward passes"
    )
    parser.add_argument(
        "--peak-tflops", type=positive_float, metavar="N", help="the device's peak, for MFU (default: the backend's)"
    )
    parser.add_argument("--timeout", type=positive_float, default=240.0, help="seconds for each way (default 240)")
    add_json(parser)


def _way(text: str) -> tuple[str, int | None]:
    name, found, tokens = text.partition("@")
    if name not in WAYS:
        raise argparse.ArgumentTypeError(f"there is no way {name!r}; there are: {', '.join(WAYS)}")
    return name, positive_int(tokens) if found else None


def run(args: argparse.Namespace) -> int:
    """Measure each way in processes of its own, print and write each at once; fail if hwrl could not be measured."""
    rows = _ROWS[args.model]
    mean = args.mean or rows.mean
    longest = args.longest or max(mean, rows.longest * mean // rows.mean)
    rows = RaggedRows(args.rows or rows.rows, mean, longest, rows.prompt)
    result: dict[str, Any] = {
        "benchmark": "train",
        "model": args.model,
        "dtype": args.dtype,
        "new_lengths": args.new_lengths,
        "rows": {**vars(rows), "tokens": sum(rows.responses()) + rows.rows * rows.prompt},
        "ways": {},
        **provenance("torch", "transformers"),
    }
    with tempfile.TemporaryDirectory(prefix="hwrl-bench-") as directory:
        MODELS[args.model].write(Path(directory))
        workload = TrainWorkload(args.model, Path(directory), rows, args.dtype, args.new_lengths)
        setups = {setup.title: setup for setup in setups_of(args)}
        plan = BenchPlan(tuple(setups), args.rounds, warm_up=1)

        def measure_way(title: str) -> None:
            row = result["ways"][title] = _measure(setups[title], workload, plan, args)
            print(_line(title, row), flush=True)
            compare(result)
            if args.json is not None:
                write(result, args.json)

        plan.one_by_one(measure_way)
    print(_table(result))
    return int(any("why_not" in row for name, row in result["ways"].items() if name.startswith("hwrl@")))


def setups_of(args: argparse.Namespace) -> list[TrainSetup]:
    """Return the ways to measure, in the order of the command: hwrl's once for each number of ranks."""
    wanted = [
        TrainSetup(name, tokens or args.micro_batch_tokens or default_tokens(name), 1) for name, tokens in args.ways
    ]
    return [
        TrainSetup(way.name, way.tokens, ranks)
        for way in wanted
        for ranks in (args.ranks if way.name.startswith("hwrl") else [1])
    ]


def _measure(setup: TrainSetup, workload: TrainWorkload, plan: BenchPlan, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one way, or the reason why there are none."""
    from hwrl.comm import serve_store, store_address
    from hwrl.testing import run_processes

    why_not = setup.why_not()
    if why_not:
        return {"why_not": why_not}
    store = serve_store()
    try:
        ranks = run_processes(measure, setup.ranks, store_address(store), setup, workload, plan, timeout_s=args.timeout)
    except Exception as exc:  # noqa: BLE001 - out of memory, or any error of a compiler: the row says how it failed
        return {"why_not": one_line(exc)}
    peak = args.peak_tflops * 1e12 if args.peak_tflops else ranks[0]["peak_flops"]
    return summarize(ranks, peak_flops=peak)


def summarize(ranks: Sequence[dict[str, Any]], *, peak_flops: float | None) -> dict[str, Any]:
    """Return one way's row from its ranks' measurements: a round lasts as long as its slowest rank.

    Tokens/s and MFU (None without ``peak_flops``) are for one device, by the median of the rounds.
    """
    first = ranks[0]
    seconds = [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    flops_per_s = _median_rate(first["flops"], seconds)
    return {
        **first,
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "warm_up_s": max(rank["warm_up_s"] for rank in ranks),
        "tokens_per_s": _median_rate(first["tokens"], seconds),
        "flops_per_s": flops_per_s,
        "mfu": None if peak_flops is None else flops_per_s / peak_flops,
        "peak_flops": peak_flops,
        "peak_nbytes": None if first["peak_nbytes"] is None else max(rank["peak_nbytes"] for rank in ranks),
        "ranks": len(ranks),
    }


def _median_rate(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    return statistics.median(amount / each for amount, each in zip(amounts, seconds, strict=True))


def compare(result: dict[str, Any]) -> None:
    """Add to each measured row its speed by the fastest reference's, and by the same way's on one device."""
    measured = {name: row for name, row in result["ways"].items() if "why_not" not in row}
    references = [row["tokens_per_s"] for name, row in measured.items() if name.startswith("reference")]
    for name, row in measured.items():
        one = measured.get(name.partition(" on ")[0])
        row["of_reference"] = row["tokens_per_s"] / max(references) if references else None
        row["of_one"] = row["tokens_per_s"] / one["tokens_per_s"] if one and row["ranks"] > 1 else None
        result["device"] = row["device"]


_COLUMNS = {"tok/s": 9, "MFU": 6, "peak GiB": 10, "s": 8, "warm-up s": 11, "recomp.": 9, "loss": 9, "of ref.": 9}
_HEADER = f"{'way':<42}" + "".join(f"{name:>{width}}" for name, width in _COLUMNS.items()) + f"{'of one':>8}"


def _line(name: str, row: dict[str, Any]) -> str:
    if "why_not" in row:
        return f"{name:<42}not measured: {row['why_not']}"
    peak = None if row["peak_nbytes"] is None else row["peak_nbytes"] / (1 << 30)
    ratios = f"{_shown(row.get('of_reference'), '.2f'):>9}{_shown(row.get('of_one'), '.2f'):>8}"
    return (
        f"{name:<42}{row['tokens_per_s']:>9,.0f}{_shown(row['mfu'], '.3f'):>6}{_shown(peak, '.1f'):>10}"
        f"{row['median_s']:>8.3f}{row['warm_up_s']:>11.1f}{row['recompilations']:>9.0f}{row['loss']:>9.4f}{ratios}"
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(result: dict[str, Any]) -> str:
    rows, measured = result["rows"], {name: row for name, row in result["ways"].items() if "why_not" not in row}
    lines = [f"{result['model']}, {result['dtype']}: {rows['rows']} rows, {rows['tokens']:,} tokens on each device"]
    if measured:
        lines += [machine_line(result), _HEADER, *(_line(name, row) for name, row in measured.items())]
    lines += unmeasured_lines(result["ways"])
    lines.append("tok/s and MFU: of one device, by the median; warm-up: the first step, with its compilation")
    lines.append("recomp.: compilations in the measured steps, where the way counts them")
    return "\n".join(lines)
