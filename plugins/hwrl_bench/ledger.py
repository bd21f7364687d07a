"""``hwrl bench ledger``: prompt groups through the real ledger of a run, beside Ray's own queue.

Replicas and trainer are processes without a model: replicas hand groups in, the trainer takes batches. Both ways carry
the same groups in calls of the same size, with the same number of unfinished groups at most. A group of the queue has
no lease, no version and no state for a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl_bench.arguments import add_json, positive_int, whole_number
from hwrl_bench.result import provenance, report
from hwrl_bench.ways import BenchPlan

if TYPE_CHECKING:
    from hwrl.run import Config
    from hwrl_bench.ledger_ways import GroupWay

HELP = "prompt groups through the ledger's process, against ray.util.queue: groups a second, p99, memory"

_CONFIG = """
dir: {directory}/run
model: {{path: {directory}/model}}
data: {{train: {directory}/train.jsonl}}
reward: {{function: "m:f"}}
rollout: {{n: {responses}}}
train: {{steps: {steps}, batch_groups: {batch}}}
async_training: {{staleness_threshold: {staleness}}}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--groups", type=positive_int, default=1_000_000, help="of each way (default 1000000)")
    parser.add_argument("--rounds", type=positive_int, default=20, help="parts, alternating (default 20)")
    parser.add_argument("--replicas", type=positive_int, default=2, help="processes that hand in (default 2)")
    parser.add_argument("--batch", type=positive_int, default=64, help="groups of a training batch (default 64)")
    parser.add_argument("--call", type=positive_int, default=16, help="groups of a replica's call (default 16)")
    parser.add_argument("--staleness", type=whole_number, default=3, help="staleness_threshold (default 3)")
    parser.add_argument("--responses", type=positive_int, default=8, help="of a group (default 8)")
    parser.add_argument("--tokens", type=positive_int, default=64, help="of a response (default 64)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure both ways in turns, print a table, write the JSON."""
    from hwrl.run import load_config, ray_cluster

    per_round = -(-args.groups // (args.rounds * args.batch)) * args.batch
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.yaml")
        steps = per_round * args.rounds // args.batch
        values = {"steps": steps, "batch": args.batch, "staleness": args.staleness, "responses": args.responses}
        path.write_text(_CONFIG.format(directory=directory, **values), encoding="utf-8")
        config = load_config(path, [])
        with ray_cluster(config, log=lambda line: None):
            ways = measure(args, config, per_round=per_round)
    result = {"benchmark": "ledger", "groups": per_round * args.rounds, "ways": ways, **_sizes(args)}
    report(result | provenance("ray", "numpy"), table(result), json_path=args.json)
    return 0


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("replicas", "batch", "call", "staleness", "responses", "tokens")}


def measure(args: argparse.Namespace, config: Config, *, per_round: int) -> dict[str, dict[str, float]]:
    """Send ``per_round`` groups in each round, by each way in turns; return the measurements by way."""
    from hwrl_bench.ledger_ways import GROUP_WAYS, WayOptions

    options = WayOptions(config, args.replicas, args.call, args.responses, args.tokens)
    ways = {name: make(options) for name, make in GROUP_WAYS.items()}
    plan = BenchPlan(tuple(ways), args.rounds)

    def send(name: str, number: int) -> dict[str, Any]:
        row = _round(ways[name], per_round, batch=args.batch)
        speed = f"{per_round / row['seconds']:,.0f} groups/s, {row['nbytes'] / (1 << 20):.1f} MiB"
        print(f"round {number + 1} of {plan.rounds}: {name}: {speed}", file=sys.stderr, flush=True)
        return row

    rows = plan.take_turns(send)
    for way in ways.values():
        way.close()
    return {name: summarize(rounds, groups=per_round) for name, rounds in rows.items()}


def _round(way: GroupWay, groups: int, *, batch: int) -> dict[str, Any]:
    """Let the replicas hand in ``groups`` groups, and take them all; return seconds, calls and the way's memory."""
    began_s = time.perf_counter()
    handing_in = way.begin(groups)
    waits = []
    for _ in range(groups // batch):
        asked_s = time.perf_counter()
        taken = way.take(batch)
        waits.append(time.perf_counter() - asked_s)
        assert len(taken) == batch
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "take_s": waits, "hand_in_s": handing_in(), "nbytes": way.resident_nbytes()}


def summarize(rounds: Sequence[dict[str, Any]], *, groups: int) -> dict[str, float]:
    """Return groups a second, percentiles of the calls in ms, and the memory after the first rounds and at the end.

    The first fifth of the rounds fills the allocator's free lists. Growth is from there to the end.
    """
    import numpy as np

    settled = rounds[len(rounds) // 5]["nbytes"]
    calls = {name: np.concatenate([row[f"{name}_s"] for row in rounds]) * 1e3 for name in ("hand_in", "take")}
    percentiles = {
        f"{name}_p{share}_ms": float(np.percentile(values, share))
        for name, values in calls.items()
        for share in (50, 99)
    }
    return {
        "groups_per_s": groups * len(rounds) / sum(row["seconds"] for row in rounds),
        **percentiles,
        "first_mib": settled / (1 << 20),
        "last_mib": rounds[-1]["nbytes"] / (1 << 20),
        "growth": rounds[-1]["nbytes"] / settled - 1,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    ways = result["ways"]
    names = next(iter(ways.values()))
    lines = [f"{result['groups']:,} groups by each way", f"{'':<18}" + "".join(f"{way:>18}" for way in ways)]
    lines += [f"{name:<18}" + "".join(f"{row[name]:>18,.4g}" for row in ways.values()) for name in names]
    lines.append("take: until the trainer has its batch, waits included; memory: resident, of the way's own process")
    return "\n".join(lines)
