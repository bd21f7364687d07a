"""``hwrl bench rollout``: hwrl's engine on vLLM beside vLLM's own ``LLM.generate``, the same requests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hwrl_bench.arguments import add_json, positive_float, positive_int
from hwrl_bench.models import MODELS
from hwrl_bench.result import machine_line, provenance, unmeasured_lines, write
from hwrl_bench.rollout_process import KINDS, VllmWay
from hwrl_bench.train_rows import RaggedRows
from hwrl_bench.ways import BenchPlan

HELP = "generation by hwrl's engine on vLLM, against vLLM's own LLM.generate with the same requests"

WAYS: dict[str, dict[str, Any]] = {
    "LLM.generate": {"kind": "llm", "inline": False},
    "LLM.generate inline": {"kind": "llm", "inline": True},
    "hwrl": {"kind": "vllm"},
    "hwrl inline": {"kind": "vllm", "options": {"engine_core": "inline"}},
    "hwrl embedded": {"kind": "embedded"},
}
"""Each way, for its process. ``inline``: in one process, without asynchronous scheduling."""
_DEFAULT_WAYS = ("LLM.generate", "LLM.generate inline", "hwrl")

_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "gpu_memory_utilization": 0.8}
_EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
_END_S = 10.0
_STDERR = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny", help="size of the model (default tiny)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(_DEFAULT_WAYS), metavar="WAY", help=f"of: {', '.join(WAYS)}"
    )
    parser.add_argument("--requests", type=positive_int, default=512, help="requests of a round (default 512)")
    parser.add_argument("--prompt", type=positive_int, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--mean", type=positive_int, default=240, help="mean tokens of a response (default 240)")
    parser.add_argument("--longest", type=positive_int, default=1024, help="most tokens of both (default 1024)")
    parser.add_argument("--max-running", type=positive_int, default=256, help="requests at once (default 256)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="measured rounds, after a short one (default 3)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument(
        "--options",
        type=json.loads,
        metavar="JSON",
        help="vLLM's engine arguments for every way (default: CUDA graphs without compilation; eager for tiny)",
    )
    parser.add_argument("--timeout", type=positive_float, default=240.0, help="seconds for each way (default 240)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each way in a process of its own, print and write each at once; fail if one could not be measured."""
    result: dict[str, Any] = {
        "benchmark": "rollout",
        "model": args.model,
        "dtype": args.dtype,
        "requests": args.requests,
        "max_running": args.max_running,
        "options": args.options or (_EAGER if args.model == "tiny" else _GRAPHS),
        "ways": {},
        **provenance("torch", "transformers"),
    }
    if VllmWay.why_not() is None:
        result["versions"]["vllm"] = VllmWay.version()
    with tempfile.TemporaryDirectory(prefix="hwrl-bench-") as directory:
        MODELS[args.model].write(Path(directory))
        workload = workload_of(args, result["options"], Path(directory))

        def measure(way: str) -> None:
            row = result["ways"][way] = _measure(way, workload, args)
            compare(result)
            print(_line(way, row), flush=True)
            if args.json is not None:
                write(result, args.json)

        BenchPlan(tuple(args.ways), args.rounds).one_by_one(measure)
    print(_table(result))
    return int(any("why_not" in row for row in result["ways"].values()))


def workload_of(args: argparse.Namespace, options: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the work of every way, for JSON: the model, vLLM's arguments, and the length of each response."""
    return {
        "directory": str(directory),
        "dtype": args.dtype,
        "vocabulary": MODELS[args.model].vocab_size,
        "prompt": args.prompt,
        "responses": RaggedRows(args.requests, args.mean, args.longest, args.prompt).responses(),
        "max_length": args.longest,
        "max_running": args.max_running,
        "rounds": args.rounds,
        "options": options,
    }


def _measure(way: str, workload: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of one way, or the reason why there are none."""
    why_not = KINDS[WAYS[way]["kind"]].why_not()
    if why_not is not None:
        return {"why_not": why_not}
    directory = Path(workload["directory"])
    asked, answer = directory / "workload.json", directory / "row.json"
    asked.write_text(
        json.dumps({**workload, **WAYS[way], "options": workload["options"] | WAYS[way].get("options", {})})
    )
    answer.unlink(missing_ok=True)
    why_not = run_alone("hwrl_bench.rollout_process", str(asked), str(answer), timeout_s=args.timeout)
    if why_not is not None or not answer.exists():
        return {"why_not": why_not or "its process gave no answer"}
    row: dict[str, Any] = json.loads(answer.read_text())
    return row if "why_not" in row else summarize(row)


def run_alone(module: str, *words: str, timeout_s: float) -> str | None:
    """Run ``python -m module words`` in a session of its own; return the reason if it failed, else None.

    No process of the session outlives the call. Its output goes to this process's stderr, and its input stays open.
    """
    command = [sys.executable, "-m", module, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=_STDERR, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=_END_S)
    return f"its process ended with exit code {code}" if code else None


def summarize(row: dict[str, Any]) -> dict[str, Any]:
    """Add tokens/s to a way's row, by the median of its rounds and by the best."""
    rates = [tokens / seconds for tokens, seconds in zip(row["tokens"], row["seconds"], strict=True)]
    return {**row, "tokens_per_s": statistics.median(rates), "best_tokens_per_s": max(rates)}


def compare(result: dict[str, Any]) -> None:
    """Add to each measured row its speed by that of the first way."""
    measured = [row for row in result["ways"].values() if "why_not" not in row]
    for row in measured:
        row["of_first"] = row["tokens_per_s"] / measured[0]["tokens_per_s"]
        row["best_of_first"] = row["best_tokens_per_s"] / measured[0]["best_tokens_per_s"]
        result["device"] = row["device"]


_HEADER = f"{'way':<24}{'tok/s':>9}{'best':>9}{'of first':>10}{'best of first':>15}{'tokens':>10}{'start s':>9}"


def _line(name: str, row: dict[str, Any]) -> str:
    if "why_not" in row:
        return f"{name:<24}not measured: {row['why_not']}"
    rates = f"{row['tokens_per_s']:>9,.0f}{row['best_tokens_per_s']:>9,.0f}"
    ratios = f"{row['of_first']:>10.2f}{row['best_of_first']:>15.2f}"
    return f"{name:<24}{rates}{ratios}{row['tokens'][0]:>10,}{row['start_s']:>9.1f}"


def _table(result: dict[str, Any]) -> str:
    measured = {name: row for name, row in result["ways"].items() if "why_not" not in row}
    lines = [f"{result['model']}, {result['dtype']}: {result['requests']} requests, {result['max_running']} at once"]
    if measured:
        lines += [machine_line(result), _HEADER, *(_line(name, row) for name, row in measured.items())]
    lines += unmeasured_lines(result["ways"])
    lines.append("tok/s: generated tokens, by the median of the rounds; first: the first way that was measured")
    return "\n".join(lines)
