"""``python -m hwrl_bench.vllm_updates``: updates and sleep of a live engine, beside vLLM's own ways, in one run.

It has two processes: a trainer with transformers' model, and a rollout with vLLM. They share one device or, with
``--apart``, have one each. The weights are random and change before each update. After each update the trainer compares
the engine's log-probabilities with its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hwrl import get_backend
from hwrl_bench.models import MODELS
from hwrl_bench.result import provenance
from hwrl_bench.ways import BenchPlan, TransferResult, TransferWay
from hwrl_bench.worker import BenchWorker

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS, _LONGEST = 8, 48, 16, 128
_ASLEEP_S = (0.0, 0.0, 2.0, 2.0)
"""Seconds asleep. 0 wakes while the driver still clears freed memory; 2 is like a wake after a trainer's step."""
_MAX_DIFFERENCE = 0.1
"""A larger mean difference of log-probabilities is wrong. bfloat16 makes less; another version makes ten times more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the JSON after each part. Return 1 if log-probabilities differ by too much."""
    parser = argparse.ArgumentParser(prog="python -m hwrl_bench.vllm_updates", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="4b", help="size of the model (default 4b)")
    parser.add_argument("--apart", action="store_true", help="trainer and rollout on a device each")
    parser.add_argument(
        "--keep-old-version", action="store_true", help="hwrl's way with room for two versions, as the setting of a run"
    )
    parser.add_argument("--parts", nargs="+", choices=("updates", "sleep"), default=["updates"], help="what to measure")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one to warm up (default 7)")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="vLLM's engine arguments")
    parser.add_argument("--timeout", type=float, default=400.0, metavar="SECONDS", help="for all of it (default 400)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the result there")
    args = parser.parse_args(arguments)

    from hwrl.comm import serve_store, store_address
    from hwrl.testing import run_processes

    store = serve_store()
    with tempfile.TemporaryDirectory() as directory:
        MODELS[args.model].write(Path(directory))
        workload = EngineWorkload(Path(directory), args.apart, args.keep_old_version, tuple(args.parts), args.options)
        plan = BenchPlan((), args.rounds, warm_up=1)
        about = _about(args)
        run_processes(_run, 2, store_address(store), plan, workload, args.json, about, timeout_s=args.timeout)
    result = json.loads(args.json.read_text())
    print(json.dumps(result, indent=2))
    return 0 if result["right"] else 1


@dataclass(frozen=True)
class EngineWorkload:
    """What both processes measure: the model in ``directory``, and vLLM with ``options``.

    With ``apart`` each process has a device of its own. With ``keep_old`` hwrl's way has room for two versions.
    """

    directory: Path
    apart: bool
    keep_old: bool
    parts: tuple[str, ...]
    options: dict[str, Any]

    def ways(self) -> dict[str, Any]:
        """Return the options of :func:`~hwrl_bench.vllm_ways.make_ways`."""
        return {"apart": self.apart, "keep_old": self.keep_old, "directory": self.directory}


def _about(args: argparse.Namespace) -> dict[str, Any]:
    distribution = importlib.metadata.packages_distributions()["vllm"][0]
    flags = (" --apart" if args.apart else "") + (" --keep-old-version" if args.keep_old_version else "")
    command = f"python -m hwrl_bench.vllm_updates --model {args.model}{flags}"
    options = f" --parts {' '.join(args.parts)} --rounds {args.rounds} --options '{json.dumps(args.options)}'"
    return {**provenance("torch", "transformers", distribution), "command": command + options}


def _run(
    rank: int, address: str, plan: BenchPlan, workload: EngineWorkload, json_path: Path, about: dict[str, Any]
) -> None:
    from hwrl.run import machine_devices

    backend = get_backend()
    if workload.apart:  # vLLM takes the first visible device, and not the current one
        device = machine_devices(os.environ, backend.devices, count=2)[rank]
        os.environ |= backend.devices.render([device])  # before the first use of a device, because it is read only then
    if backend.device_count():
        backend.set_device(0)
    worker = BenchWorker.connect(rank, 2, address, backend)
    process: EngineProcess
    if rank:
        process = RolloutProcess(worker, plan, workload)
    else:
        process = TrainerProcess(worker, plan, workload, json_path, about)
    for part in workload.parts:
        process.measure_part(part)


class EngineProcess(ABC):
    """One of the two processes. Both run the same rounds, and each method does this process's part of them."""

    def __init__(self, worker: BenchWorker, plan: BenchPlan, workload: EngineWorkload) -> None:
        from hwrl_bench.vllm_ways import wire_s

        self.worker, self.plan, self.workload = worker, plan, workload
        self.version = self.checks = 0
        self.nbytes = _model_nbytes(workload.directory)
        self.wire_s = wire_s(worker, nbytes=self.nbytes, apart=workload.apart)
        self.ways = self.set_up()

    @abstractmethod
    def set_up(self) -> dict[str, TransferWay]:
        """Build the trainer's model or the rollout's engine. Return this process's ends of the ways, by name."""

    @abstractmethod
    def update(self, way: str) -> dict[str, Any]:
        """Send or receive the next version by ``way``. The trainer returns the times; the rollout returns nothing."""

    @abstractmethod
    def check(self) -> dict[str, Any]:
        """Generate responses, or compare their log-probabilities. The trainer returns the differences."""

    @abstractmethod
    def finish(self, part: str, rows: Any) -> None:
        """Send the part's rows to the trainer. The trainer writes the rows of both processes."""

    def measure_part(self, name: str) -> None:
        """Measure one part: "updates" or "sleep"."""
        self.finish(name, self.measure_updates() if name == "updates" else self.measure_sleep())

    def measure_updates(self) -> dict[str, list[dict[str, Any]]]:
        """Update by the ways in turn. Return a row for each round, by way."""

        def measure(way: str, _: int) -> dict[str, Any]:
            self.worker.barrier()
            return {**self.update(way), **self.check()}

        return replace(self.plan, ways=tuple(self.ways)).take_turns(measure)

    def measure_sleep(self) -> dict[str, Any]:
        """Sleep and wake with hwrl's memory for the weights, then with vLLM's. Return the rows by memory and level."""
        measured: dict[str, Any] = {}
        for memory in ("hwrl", "vLLM"):
            self.use_sleep_memory(memory)
            self.worker.barrier()
            self.update("hwrl")
            level_1 = [
                {**self.time_sleep(1), **_stay_asleep(seconds), **self.time_wake(None), **self.check()}
                for seconds in _ASLEEP_S
            ]
            measured[memory] = {"level 1": level_1, "level 2": [self._level_2(seconds) for seconds in _ASLEEP_S]}
        return measured

    def _level_2(self, asleep_s: float) -> dict[str, Any]:
        """Sleep and keep nothing; wake the weights, update them, wake the attention cache."""
        row = {**self.time_sleep(2), **_stay_asleep(asleep_s), **self.time_wake("weights")}
        self.worker.barrier()
        updated = self.update("hwrl")
        row |= {"update": updated["total_s"]} if updated else {}
        return {**row, **self.time_wake("kv_cache"), **self.check()}

    def use_sleep_memory(self, memory: str) -> None:
        """Choose the memory that keeps the weights in level 1: "hwrl" or "vLLM"."""
        return

    def time_sleep(self, level: int) -> dict[str, float]:
        """Let the engine sleep. Return the seconds and the freed bytes; nothing in the trainer."""
        return {}

    def time_wake(self, tag: str | None) -> dict[str, float]:
        """Wake the engine, or only its part ``tag``. Return the seconds; nothing in the trainer."""
        return {}


def _model_nbytes(directory: Path) -> int:
    import torch

    from hwrl.models import build_model

    with torch.device("meta"):
        model = build_model(directory, dtype=torch.bfloat16)
    return sum(parameter.nbytes for parameter in model.parameters())


class TrainerProcess(EngineProcess):
    """The trainer: it has transformers' model, sends its weights, and writes the result."""

    def __init__(
        self,
        worker: BenchWorker,
        plan: BenchPlan,
        workload: EngineWorkload,
        json_path: Path,
        about: dict[str, Any],
    ) -> None:
        super().__init__(worker, plan, workload)
        self._json_path = json_path
        self.result: dict[str, Any] = {**about, "bytes": self.nbytes, "wire_s": self.wire_s, "right": True}

    def set_up(self) -> dict[str, TransferWay]:
        import torch

        from hwrl.models import build_model
        from hwrl_bench.vllm_ways import make_ways

        with self.worker.backend.device():
            self.model = build_model(self.workload.directory, dtype=torch.bfloat16).eval()
        named = [(name, parameter.data) for name, parameter in self.model.named_parameters()]
        return make_ways(self.worker, named, None, **self.workload.ways())

    def update(self, way: str) -> dict[str, Any]:
        self.version += 1
        self._change_weights()
        self.worker.backend.synchronize()
        self.worker.put(f"begin/{self.version}", True)
        begin = time.monotonic()
        sent = self.ways[way].send(self.version)
        received = self.worker.get(f"updated/{self.version}")
        return {"total_s": received.pop("end") - begin, "sender": dict(sent.stages), **received}

    def check(self) -> dict[str, Any]:
        """Return how far the engine's log-probabilities are from the model's, and its tokens from greedy ones."""
        import torch

        self.checks += 1
        differences, behind = [], []
        for prompt, response, logprobs in self.worker.get(f"generated/{self.checks}"):
            tokens = torch.tensor([*prompt, *response], device=self.worker.backend.device()).long()
            with torch.no_grad():
                logits = self.model(tokens[None]).logits[0, len(prompt) - 1 : -1].float().cpu()
            chosen = tokens[len(prompt) :, None].cpu()
            expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            differences.append((expected - torch.tensor(logprobs)).abs())
            behind.append(logits.max(-1).values - logits.gather(1, chosen)[:, 0])
        difference, places = torch.cat(differences), torch.cat(behind)
        self.result["right"] &= difference.mean().item() < _MAX_DIFFERENCE
        return {
            "logprob_difference": {"mean": difference.mean().item(), "max": difference.max().item()},
            "greedy": {"equal": (places == 0).float().mean().item(), "furthest_behind": places.max().item()},
        }

    def finish(self, part: str, rows: Any) -> None:
        rows = merge(rows, self.worker.get(f"part/{part}"))
        self.result[part] = {way: summarize(each) for way, each in rows.items()} if part == "updates" else rows
        self._json_path.write_text(json.dumps(self.result, indent=2) + "\n")

    def _change_weights(self) -> None:
        import torch

        torch.manual_seed(self.version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.02)


class RolloutProcess(EngineProcess):
    """The rollout: it has the engine on vLLM."""

    def set_up(self) -> dict[str, TransferWay]:
        import torch

        from hwrl.interfaces import RolloutSettings
        from hwrl_bench.vllm_ways import make_ways, vllm_transfer_options
        from hwrl_vllm import VllmEngine

        settings = RolloutSettings(
            model_directory=self.workload.directory,
            dtype=torch.bfloat16,
            eos_ids=[1],
            max_running=64,
            max_length=_LONGEST,
            free_cache_engine="sleep" in self.workload.parts,
        )
        options = {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            **vllm_transfer_options(self.worker.backend, apart=self.workload.apart),
        }
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM's own transfers pickle objects for its process
        self.engine = VllmEngine(settings, options=options | self.workload.options, backend=self.worker.backend)
        self._before = self._held(reset=True)
        return make_ways(self.worker, [], self.engine, **self.workload.ways())

    def update(self, way: str) -> dict[str, Any]:
        self.version += 1
        self.worker.get(f"begin/{self.version}")
        received: TransferResult = self.ways[way].receive(self.version)
        end = time.monotonic()
        row = {"pause_s": received.pause_s, "receiver": dict(received.stages), "end": end}
        row["extra_nbytes"] = self._extra_nbytes()
        self.worker.put(f"updated/{self.version}", row)
        return {}

    def _held(self, *, reset: bool) -> list[tuple[int, int]]:
        """Return the bytes held now and the most since the last ``reset``: of this process, then of each worker."""
        from hwrl_bench.vllm_ways import held_by_workers, held_nbytes

        workers = self.engine.core.call_workers(partial(held_by_workers, reset=reset))
        return [held_nbytes(reset=reset), *map(tuple, workers)]

    def _extra_nbytes(self) -> dict[str, int]:
        """Return the most bytes in an update, less those at the start: of this process, and the most of a worker."""
        most = self._held(reset=True)
        here, *workers = [now[1] - before[0] for now, before in zip(most, self._before, strict=True)]
        return {"rollout process": here, "worker": max(workers)}

    def check(self) -> dict[str, Any]:
        import numpy as np

        from hwrl.interfaces import GenerationRequest, Sampling

        rng = np.random.default_rng(self.version)
        vocabulary = self.engine._base["lm_head.weight"].shape[0]
        prompts = rng.integers(3, vocabulary, size=(_PROMPTS, _PROMPT_TOKENS)).astype(np.int32)
        sampling = Sampling(_NEW_TOKENS, 0.0)
        self.engine.submit([GenerationRequest(number, prompt, sampling) for number, prompt in enumerate(prompts)])
        generated = []
        while self.engine.pending():
            for done in self.engine.step():
                response = done.response
                tokens, logprobs = np.asarray(response.token_ids).tolist(), np.asarray(response.logprobs).tolist()
                generated.append((prompts[done.request_id].tolist(), tokens, logprobs))
        self.checks += 1
        self.worker.put(f"generated/{self.checks}", generated)
        return {}

    def finish(self, part: str, rows: Any) -> None:
        self.worker.put(f"part/{part}", rows)

    def use_sleep_memory(self, memory: str) -> None:
        if memory == "vLLM":
            self.engine.vllm.collective_rpc(_use_vllm_memory)

    def time_sleep(self, level: int) -> dict[str, float]:
        freed, seconds = _timed(lambda: self.engine.sleep(level=level))
        return {"sleep": seconds, "freed_nbytes": freed}

    def time_wake(self, tag: str | None) -> dict[str, float]:
        _, seconds = _timed(lambda: self.engine.wake([tag] if tag else ("weights", "kv_cache")))
        return {f"wake {tag}" if tag else "wake": seconds}


def _stay_asleep(seconds: float) -> dict[str, float]:
    time.sleep(seconds)
    return {"asleep_s": seconds}


def _use_vllm_memory(worker: Any) -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    worker.worker._sleep_mode_backend = CuMemBackend()  # vLLM passes a wrapper of the worker to functions


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def merge(rows: Any, others: Any) -> Any:
    """Return the rows of two processes as one. Dicts are merged by key, and lists of rows by position."""
    if isinstance(rows, list):
        return [{**one, **other} for one, other in zip(rows, others, strict=True)]
    return {key: merge(rows[key], others[key]) for key in rows}


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the rounds' values, and the total of each round."""
    summary: dict[str, Any] = {"total_s": [row["total_s"] for row in rows]}
    for key, value in rows[0].items():
        if isinstance(value, dict):
            summary[key] = {stage: statistics.median(row[key][stage] for row in rows) for stage in value}
        else:
            summary[f"median_{key}"] = statistics.median(row[key] for row in rows)
    return summary


if __name__ == "__main__":
    raise SystemExit(main())
