"""Derive the costs of a simulation from the ``metrics.jsonl`` of a real run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist, median, stdev

from hwrl.errors import ConfigError, manual
from hwrl.run import Config, Metrics, read_metrics
from hwrl_simulate.simulation import simulate
from hwrl_simulate.size import SimulatedSize, placed
from hwrl_simulate.workload import Lengths, Workload, longest_response

_POSITIVE = ("perf/step_s", "response/tokens", "response/length_mean", "timing_s/train")
_SUMMED = ("rollout/generate_s", "rollout/tokens_per_s")
"""Metrics that may be 0 in a step, such as one that was shorter than a response, but not in all steps."""
_NEEDED = (*_POSITIVE, *_SUMMED)
_MIN_LINES = 8
_ROUNDS = 4
"""How many times the measured run is simulated. The costs are corrected after each simulation."""
_STEPS = 30


def read_run(path: Path) -> list[Metrics]:
    """Return the lines with times of a ``metrics.jsonl``, without the first fifth. ``path`` may be a run directory.

    Raises ConfigError.
    """
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"{path} cannot be read", why="there is no such file", fix="name a run directory, or its metrics.jsonl"
        )
    lines = [line for line in read_metrics(path) if all(name in line for name in _NEEDED)]
    if len(lines) < _MIN_LINES:
        raise ConfigError(
            f"{path} cannot calibrate a simulation",
            why=f"only {len(lines)} of its lines have {', '.join(_NEEDED)}, and {_MIN_LINES} are needed",
            fix=f"use the metrics.jsonl of a longer run, or none; see {manual('simulate.md')}",
        )
    lines = lines[len(lines) // 5 :]
    _require_values(path, lines)
    return lines


def _require_values(path: Path, lines: Sequence[Metrics]) -> None:
    """Raise ConfigError if costs cannot be computed from the needed metrics of ``lines``."""
    wrong = [
        f"{name} is {line[name]:g} in step {line['step']:.0f}"
        for line in lines
        for name in _NEEDED
        if not math.isfinite(line[name]) or line[name] < 0 or (line[name] == 0 and name in _POSITIVE)
    ]
    wrong += [f"{name} is 0 in all steps" for name in _SUMMED if not any(line[name] for line in lines)]
    if wrong:
        raise ConfigError(
            f"{path} cannot calibrate a simulation",
            why=f"{wrong[0]}: a cost is a number of seconds, divided by the work that was done in them",
            fix=f"use the metrics.jsonl of another run, or none; see {manual('simulate.md')}",
        )


def calibrate(config: Config, lines: Sequence[Metrics], base: Workload) -> Workload:
    """Return ``base`` with the costs that are measured in ``lines``, a run of ``config``.

    The cost of an activity is the sum of its seconds, divided by the sum of its work. Two costs cannot be computed in
    this way, so the run is simulated and they are corrected until the simulation agrees with the measurement:

    - The cost of a decoding step, by the tokens per busy second. A step takes longer in a fuller replica.
    - The cost of a batch, by the trainer's waits. Generation does not explain all of them: calls between processes and
      shared processors also take time.
    """
    size = as_measured(config, _STEPS)
    measured = _trainer_costs(config, lines, base) | _rollout_costs(config, lines) | _lengths(config, lines, base)
    workload = dataclasses.replace(base, **measured)
    speed, wait_s = generated_per_busy_s(lines), _mean_of(lines, "timing_s/wait")
    full = dataclasses.replace(workload, full_step_s=config.rollout.max_running / speed, mtbf_h=1e9)
    for _ in range(_ROUNDS):
        simulated = settled(simulate(size, full).lines)
        full = dataclasses.replace(
            full,
            full_step_s=full.full_step_s * generated_per_busy_s(simulated) / speed,
            batch_s=max(0.0, full.batch_s + wait_s - _mean_of(simulated, "timing_s/wait")),
        )
    return dataclasses.replace(workload, full_step_s=full.full_step_s, batch_s=full.batch_s)


def settled(lines: Sequence[Metrics]) -> list[Metrics]:
    """Return the lines of the steady state: all except the first fifth."""
    return list(lines[len(lines) // 5 :])


def generated_per_busy_s(lines: Sequence[Metrics]) -> float:
    """Return the generated tokens per second in which a replica generated."""
    tokens = sum(line.get("rollout/tokens_per_s", 0.0) * line["perf/step_s"] for line in lines)
    return tokens / max(1e-9, sum(line["rollout/generate_s"] for line in lines))


def _trainer_costs(config: Config, lines: Sequence[Metrics], base: Workload) -> dict[str, float]:
    synced = [line for line in lines if line.get("timing_s/sync", 0.0) > 0]
    busy = ("timing_s/wait", "timing_s/sync", "timing_s/train", "timing_s/critic", "timing_s/save")
    others = [line["perf/step_s"] - sum(line.get(name, 0.0) for name in busy) for line in lines]
    nbytes = _median_of(synced, "sync/nbytes") or base.sync_nbytes
    receivers = _median_of(synced, "sync/receivers") or config.rollout.replicas
    senders = as_measured(config, len(lines)).senders
    explained_s = nbytes / (base.bandwidth * senders) + base.sync_replica_s * receivers
    waits = sorted(line.get("timing_s/wait", 0.0) for line in lines)
    return _training_costs(config, lines, base) | {
        "batch_s": waits[len(waits) // 10],  # the first guess: a wait that consists only of calls
        "sync_nbytes": nbytes,
        "sync_fixed_s": max(0.0, _mean_of(synced, "timing_s/sync") - explained_s),
        "overhead_s": max(0.0, sum(others) / len(others)),
        "checkpoint_s": _mean_of(lines, "checkpoint/blocked_s"),
    }


def _training_costs(config: Config, lines: Sequence[Metrics], base: Workload) -> dict[str, float]:
    """Return the seconds of a token and their spread, by the work as it is simulated. A critic's time counts, too."""
    seconds = [line["timing_s/train"] + line.get("timing_s/critic", 0.0) for line in lines]
    work = [max(line["response/tokens"] / config.train.ranks, line.get("response/length_max", 0.0)) for line in lines]
    token_s = (sum(seconds) - base.train_fixed_s * len(lines)) / sum(work)
    if token_s <= 0:
        raise ConfigError(
            f"the assumption train_fixed_s={base.train_fixed_s:g} does not fit the measured run",
            why=f"its training steps took {sum(seconds) / len(lines):.3g} s on average, so none is left for the tokens",
            fix="assume a smaller train_fixed_s",
        )
    expected = [base.train_fixed_s + token_s * tokens for tokens in work]
    spread = stdev(math.log(took / fits) for took, fits in zip(seconds, expected, strict=True))
    return {"train_token_s": token_s, "train_sigma": spread}


def _rollout_costs(config: Config, lines: Sequence[Metrics]) -> dict[str, float]:
    replicas = _median_of(lines, "rollout/replicas") or config.rollout.replicas
    versions = lines[-1].get("weights/version", 0.0) - lines[0].get("weights/version", 0.0)
    versions = versions or (len(lines) - 1) / config.async_training.trigger_parameter_sync_step
    later = lines[1:]  # the versions are counted from the end of the first line
    update_s = sum(line.get("rollout/update_s", 0.0) for line in later) / max(1.0, versions * replicas)
    failures, trained = (
        lines[-1].get(name, 0.0) - lines[0].get(name, 0.0) for name in ("ledger/failures", "ledger/trained")
    )
    costs = {"update_s": update_s, "failed_ratio": failures / max(1.0, failures + trained)}
    if config.algorithm.filter_groups:
        costs["equal_ratio"] = median(line.get("groups/filtered_ratio", 0.0) for line in lines)
    return costs


def _lengths(config: Config, lines: Sequence[Metrics], base: Workload) -> dict[str, float]:
    """Return the mean length and the sigma that explains the truncated share, or the longest response without one."""
    limit = longest_response(config)
    mean = sum(line["response/length_mean"] for line in lines) / len(lines)
    cut = sum(line.get("response/truncated_ratio", 0.0) for line in lines) / len(lines)
    longest = _median_of(lines, "response/length_max") or mean
    if longest <= mean or mean >= 0.999 * limit:
        return {"mean_tokens": mean, "sigma": 0.0}
    if longest >= limit and 0 < cut < 1:  # by the share of responses above the limit
        target, logarithm = NormalDist().inv_cdf(1 - cut), math.log(limit)
    else:  # by the longest of all responses of a step
        responses = config.train.batch_groups * config.rollout.n
        target, logarithm = NormalDist().inv_cdf(1 - 0.5 / responses), math.log(longest)
    return {
        "mean_tokens": mean,
        "sigma": _solve(lambda sigma: _place(mean, sigma, limit, logarithm), target, base.sigma),
    }


def _place(mean: float, sigma: float, limit: int, logarithm: float) -> float:
    """Return how many standard deviations ``logarithm`` is above ``mu`` of the lengths with this mean and sigma."""
    return (logarithm - Lengths.with_mean(mean, sigma=sigma, limit=limit).mu) / sigma


def _solve(place: Callable[[float], float], target: float, default: float) -> float:
    """Return the sigma from 0.05 to 3, in steps of 0.05, for which ``place`` is nearest to ``target``."""
    grid = [0.05 * step for step in range(1, 61)]
    return min(grid, key=lambda sigma: abs(place(sigma) - target)) if math.isfinite(target) else default


def _median_of(lines: Sequence[Metrics], name: str) -> float:
    values = [line[name] for line in lines if name in line]
    return median(values) if values else 0.0


def _mean_of(lines: Sequence[Metrics], name: str) -> float:
    values = [line[name] for line in lines if name in line]
    return sum(values) / max(1, len(values))


def averages(lines: Sequence[Metrics]) -> dict[str, float]:
    """Return averages over a run: seconds per step, tokens per second, idle shares of both sides, staleness."""
    wall_s = sum(line["perf/step_s"] for line in lines)
    idle_s, busy_s = (
        sum(line.get(f"rollout/{name}", 0.0) for line in lines for name in names)
        for names in (["idle_s"], ["generate_s", "update_s", "sleep_s"])
    )
    return {
        "step_s": wall_s / len(lines),
        "tokens_per_s": sum(line["response/tokens"] for line in lines) / wall_s,
        "trainer_idle": sum(line["timing_s/wait"] for line in lines) / wall_s,
        "rollout_idle": idle_s / max(1e-9, idle_s + busy_s),
        "staleness_mean": sum(line["staleness/mean"] for line in lines) / len(lines),
        "staleness_max": max(line["staleness/max"] for line in lines),
        "sync_s": sum(line["timing_s/sync"] for line in lines) / len(lines),
        "partial": sum(line["partial/ratio"] for line in lines) / len(lines),
    }


def as_measured(config: Config, steps: int) -> SimulatedSize:
    """Return the size of the measured run, with ``steps`` steps."""
    return placed(config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})}))
