"""``python -m hwrl_vllm.bench``: updates of a live engine and its sleep, beside vLLM's own ways, in one run.

Two processes, a trainer with transformers' model and a rollout with vLLM, on one device or, with ``--apart``, on two.
The weights are random and others before each update, and after each the engine's log-probabilities are compared with
the trainer's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.cli.bench_peers import Seat
from hwrl.cli.provenance import provenance

if TYPE_CHECKING:
    from hwrl_vllm.bench_ways import Way

MODELS: dict[str, dict[str, int]] = {
    "4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
"""Shapes of Qwen3 with tied embeddings: 4b has 398 tensors, 8.04 GB as bfloat16."""
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS, _LONGEST = 8, 48, 16, 128
_STEP_S = 300.0
_ASLEEP_S = (0.0, 0.0, 2.0, 2.0)
"""At once, and after a while, as when a trainer has used the device: drivers clear freed memory, which takes time."""
_NOISE = 0.1
"""The mean difference of log-probabilities that bfloat16 makes is below; another version's is ten times that."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the JSON after each part; the exit status is 1 if log-probabilities were not equal."""
    parser = argparse.ArgumentParser(prog="python -m hwrl_vllm.bench", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="4b", help="size of the model (default 4b)")
    parser.add_argument("--apart", action="store_true", help="trainer and rollout on a device each")
    parser.add_argument("--parts", nargs="+", choices=("updates", "sleep"), default=["updates"], help="what to measure")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one to warm up (default 7)")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="vLLM's engine arguments")
    parser.add_argument("--timeout", type=float, default=400.0, metavar="SECONDS", help="for all of it (default 400)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the result there")
    args = parser.parse_args(arguments)

    from hwrl.comm import serve_store, store_address
    from hwrl.testing.processes import run_processes

    store = serve_store()
    with tempfile.TemporaryDirectory() as directory:
        _write_model(Path(directory), args.model)
        plan = Plan(Path(directory), args.apart, tuple(args.parts), args.rounds, args.options, args.json, _about(args))
        run_processes(_run, 2, store_address(store), plan, timeout_s=args.timeout)
    result = json.loads(args.json.read_text())
    print(json.dumps(result, indent=2))
    return 0 if result["right"] else 1


@dataclass(frozen=True)
class Plan:
    """What both processes do."""

    model_directory: Path
    apart: bool
    parts: tuple[str, ...]
    rounds: int
    options: dict[str, Any]
    json: Path
    about: dict[str, Any]


def _about(args: argparse.Namespace) -> dict[str, Any]:
    distribution = importlib.metadata.packages_distributions()["vllm"][0]
    command = f"python -m hwrl_vllm.bench --model {args.model}{' --apart' if args.apart else ''}"
    options = f" --parts {' '.join(args.parts)} --rounds {args.rounds} --options '{json.dumps(args.options)}'"
    return {**provenance("torch", "transformers", distribution), "command": command + options}


def _write_model(directory: Path, name: str) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(**MODELS[name], tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(directory)


def _run(rank: int, address: str, plan: Plan) -> None:
    from hwrl.comm import connect_store
    from hwrl.discovery import get_backend
    from hwrl.run.placement import machine_devices

    backend = get_backend()
    if plan.apart:  # vLLM takes the first device that the process sees, whichever is the current one
        device = machine_devices(os.environ, backend.devices, count=2)[rank]
        os.environ |= backend.devices.render([device])  # read once, when the device is first used
    if backend.device_count():
        backend.set_device(0)
    seat = Seat(rank, 2, connect_store(address, timeout_s=_STEP_S), backend)
    side: Side = Rollout(seat, plan) if rank else Trainer(seat, plan)
    for part in plan.parts:
        side.part(part)


@dataclass
class Side:
    """One process's part in what both do in step."""

    seat: Seat
    plan: Plan
    version: int = 0
    turn: int = 0
    checks: int = 0
    ways: dict[str, Way] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from hwrl_vllm.bench_ways import make_ways, wire_s

        self.nbytes, self.wire_s = wire_s(self.seat, self.plan)
        self.set_up()
        self.ways = make_ways(self.seat, getattr(self, "engine", None), apart=self.plan.apart)

    def set_up(self) -> None:
        """Build the model, or the engine."""

    def part(self, name: str) -> None:
        """Measure one part; the trainer writes what both found."""
        measured = self.updates() if name == "updates" else self.sleeps()
        self.finish(name, measured)

    def finish(self, name: str, measured: Any) -> None:
        raise NotImplementedError

    def meet(self) -> None:
        """Wait until the other process is here and its device is idle."""
        self.turn += 1
        self.seat.backend.synchronize()
        self.seat.tell(f"here/{self.turn}/{self.seat.rank}", True)
        self.seat.ask(f"here/{self.turn}/{1 - self.seat.rank}")

    def update(self, way: str) -> dict[str, Any]:
        raise NotImplementedError

    def check(self) -> dict[str, Any]:
        raise NotImplementedError

    def updates(self) -> dict[str, Any]:
        """Update by each way in turns; return the times of each round, by way."""
        rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in self.ways}
        for _ in range(1 + self.plan.rounds):
            for way in list(self.ways):
                self.meet()
                measured = self.update(way)
                rounds[way].append({**measured, **self.check()})
        return rounds

    def sleeps(self) -> dict[str, Any]:
        """Sleep and wake, with hwrl's memory for the weights and with vLLM's own."""
        measured: dict[str, Any] = {}
        for whose in ("hwrl", "vLLM"):
            self.use_sleep_of(whose)
            self.meet()
            self.update("hwrl")
            level_1 = [
                {**self.time_sleep(1), **_stay_asleep(seconds), **self.time_wake(None), **self.check()}
                for seconds in _ASLEEP_S
            ]
            level_2 = []
            for asleep_s in _ASLEEP_S:
                seconds = {**self.time_sleep(2), **_stay_asleep(asleep_s), **self.time_wake("weights")}
                self.meet()
                updated = self.update("hwrl")
                seconds |= {"update": updated["total_s"]} if updated else {}
                level_2.append({**seconds, **self.time_wake("kv_cache"), **self.check()})
            measured[whose] = {"level 1": level_1, "level 2": level_2}
        return measured

    def use_sleep_of(self, whose: str) -> None:
        """Choose where weights are kept in level 1."""

    def time_sleep(self, level: int) -> dict[str, float]:
        return {}

    def time_wake(self, tag: str | None) -> dict[str, float]:
        return {}


class Trainer(Side):
    """Has transformers' model, sends its weights, and writes what was measured."""

    def set_up(self) -> None:
        import torch

        from hwrl.models import build_model

        with self.seat.backend.device():
            self.model = build_model(self.plan.model_directory, dtype=torch.bfloat16).eval()
        self.result: dict[str, Any] = {**self.plan.about, "bytes": self.nbytes, "wire_s": self.wire_s, "right": True}

    def update(self, way: str) -> dict[str, Any]:
        self.version += 1
        self._change()
        named = [(name, tensor.data) for name, tensor in self.model.named_parameters()]
        self.seat.backend.synchronize()
        self.seat.tell(f"begin/{self.version}", True)
        begin = time.monotonic()
        stages = self.ways[way].send(self.version, named)
        theirs = self.seat.ask(f"updated/{self.version}")
        return {"total_s": theirs.pop("end") - begin, "sender": stages, **theirs}

    def check(self) -> dict[str, Any]:
        """Return by how much the engine's log-probabilities differ from those of the model that was sent."""
        import torch

        self.checks += 1
        differences, behind = [], []
        for prompt, response in self.seat.ask(f"generated/{self.checks}"):
            tokens = torch.tensor([*prompt, *response.token_ids], device=self.seat.backend.device()).long()
            with torch.no_grad():
                logits = self.model(tokens[None]).logits[0, len(prompt) - 1 : -1].float().cpu()
            chosen = tokens[len(prompt) :, None].cpu()
            mine = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            differences.append((mine - torch.from_numpy(response.logprobs)).abs())
            behind.append(logits.max(-1).values - logits.gather(1, chosen)[:, 0])
        difference, places = torch.cat(differences), torch.cat(behind)
        return {
            "logprob_difference": {"mean": difference.mean().item(), "max": difference.max().item()},
            "greedy": {"equal": (places == 0).float().mean().item(), "furthest_behind": places.max().item()},
        }

    def finish(self, name: str, measured: Any) -> None:
        theirs = self.seat.ask(f"part/{name}")
        rows = [row for rows in _leaves(measured) for row in rows]
        self.result["right"] &= all(row["logprob_difference"]["mean"] < _NOISE for row in rows)
        merged = _merge(measured, theirs)
        self.result[name] = {way: _summary(rows[1:]) for way, rows in merged.items()} if name == "updates" else merged
        self.plan.json.write_text(json.dumps(self.result, indent=2) + "\n")

    def _change(self) -> None:
        import torch

        torch.manual_seed(self.version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.02)


class Rollout(Side):
    """Has vLLM's engine."""

    def set_up(self) -> None:
        import torch

        from hwrl.interfaces import RolloutSettings
        from hwrl_vllm.bench_ways import own_transfer
        from hwrl_vllm.engine import VllmEngine

        settings = RolloutSettings(
            model_directory=self.plan.model_directory,
            dtype=torch.bfloat16,
            eos_ids=[1],
            max_running=64,
            max_length=_LONGEST,
            may_sleep="sleep" in self.plan.parts,
        )
        options = {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            **own_transfer(self.seat.backend, apart=self.plan.apart),
        }
        self.engine = VllmEngine(settings, options=options | self.plan.options, backend=self.seat.backend)

    def update(self, way: str) -> dict[str, Any]:
        self.version += 1
        self.seat.ask(f"begin/{self.version}")
        stages = self.ways[way].receive(self.version)
        self.seat.tell(f"updated/{self.version}", {**stages, "end": time.monotonic()})
        return {}

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
            generated += [(prompts[done.request_id].tolist(), done.response) for done in self.engine.step()]
        self.checks += 1
        self.seat.tell(f"generated/{self.checks}", generated)
        return {}

    def finish(self, name: str, measured: Any) -> None:
        self.seat.tell(f"part/{name}", measured)

    def use_sleep_of(self, whose: str) -> None:
        if whose == "vLLM":
            self.engine._vllm.collective_rpc(_use_vllms_sleep)

    def time_sleep(self, level: int) -> dict[str, float]:
        freed, seconds = _timed(lambda: self.engine.sleep(level=level))
        return {"sleep": seconds, "freed_nbytes": freed}

    def time_wake(self, tag: str | None) -> dict[str, float]:
        _, seconds = _timed(lambda: self.engine.wake([tag] if tag else ("weights", "kv_cache")))
        return {f"wake {tag}" if tag else "wake": seconds}


def _stay_asleep(seconds: float) -> dict[str, float]:
    time.sleep(seconds)
    return {"asleep_s": seconds}


def _use_vllms_sleep(worker: Any) -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    worker.worker._sleep_mode_backend = CuMemBackend()  # a wrapper holds it


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def _leaves(tree: Any) -> list[list[dict[str, Any]]]:
    return [tree] if isinstance(tree, list) else [leaf for branch in tree.values() for leaf in _leaves(branch)]


def _merge(mine: Any, theirs: Any) -> Any:
    """Return the two processes' measurements as one."""
    if isinstance(mine, list):
        return [{**one, **other} for one, other in zip(mine, theirs, strict=True)]
    return {key: _merge(mine[key], theirs[key]) for key in mine}


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds, and each round's total."""
    summary: dict[str, Any] = {"total_s": [row["total_s"] for row in rows]}
    for key, value in rows[0].items():
        if isinstance(value, dict):
            summary[key] = {stage: statistics.median(row[key][stage] for row in rows) for stage in value}
        else:
            summary[f"median_{key}"] = statistics.median(row[key] for row in rows)
    return summary


if __name__ == "__main__":
    raise SystemExit(main())
