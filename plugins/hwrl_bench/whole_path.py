"""``hwrl bench path``: one model from prompt to weight update, through ``hwrl train`` and through a peer in one run."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hwrl_bench.arguments import add_json, several, whole_number
from hwrl_bench.models import MODELS, ModelShape, random_model
from hwrl_bench.result import provenance, report
from hwrl_bench.training_runs import History, train_in_turns
from hwrl_bench.ways import BenchPlan

HELP = "the whole path from prompt to weight update, in tokens/s, beside a peer on the same model and prompts"

PEERS = {"trl": "hwrl_bench.peer_trl"}
"""Importable packages, each with the script that trains with it."""


@dataclass(frozen=True)
class PathWorkload:
    """What every way does: ``prompts`` of ``prompt_tokens`` tokens, ``n`` responses to each of ``groups`` in a step.

    ``end_tokens`` of the vocabulary end a response. The weights are random, so the lengths are nearly geometric with
    mean vocabulary / ``end_tokens``, cut off at ``max_new_tokens``. ``staleness`` is the largest age of a token in
    weight versions. ``tokens_per_pass`` bounds one forward pass of the trainer.
    """

    directory: str
    steps: int
    groups: int = 16
    n: int = 8
    prompt_tokens: int = 128
    max_new_tokens: int = 1024
    end_tokens: int = 292
    staleness: int = 2
    max_running: int = 256
    tokens_per_pass: int = 8192
    dtype: str = "bfloat16"


def reward(prompt: str, response: str, answer: str) -> float:
    """Return the share of even words: cheap, and different for each response."""
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", choices=sorted(MODELS), default="1.7b", help="size of the model (default 1.7b)")
    parser.add_argument("--steps", type=several, default=8, help="training steps of each way, above 1 (default 8)")
    parser.add_argument("--engine", default="vllm", help="hwrl's rollout.engine (default vllm)")
    parser.add_argument(
        "--peers", nargs="*", choices=sorted(PEERS), default=[], help="other packages to run after hwrl"
    )
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="the rollout engine's arguments")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of hwrl's configuration")
    parser.add_argument("--seed", type=whole_number, default=1)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train by each way, print a table, write the JSON after each way. A peer that fails is a row with its reason."""
    with tempfile.TemporaryDirectory() as directory:
        workload = make_workload(Path(directory), model=args.model, steps=args.steps, seed=args.seed)
        rows = {"hwrl": _run_hwrl(workload, args)}
        result = {
            "benchmark": "path",
            "workload": asdict(workload),
            "ways": rows,
            **provenance("torch", "transformers"),
        }
        report(result, table(rows), json_path=args.json)
        for peer in args.peers:
            rows[peer] = _run_peer(peer, workload, args.options)
            report(result, table(rows), json_path=args.json)
    return 0


def make_workload(directory: Path, *, model: str, steps: int, seed: int) -> PathWorkload:
    """Write a random model, its tokenizer and the prompts to ``directory``."""
    workload = PathWorkload(str(directory), steps)
    if model == "tiny":
        workload = replace(workload, prompt_tokens=8, max_new_tokens=16, end_tokens=50, groups=2, n=4, dtype="float32")
    shape = MODELS[model]
    _write_model(directory / "model", shape, workload, seed=seed)
    _write_tokenizer(directory / "model", shape.vocab_size)
    _write_prompts(directory / "prompts.jsonl", shape.vocab_size, workload, seed=seed)
    return workload


def _write_model(directory: Path, shape: ModelShape, workload: PathWorkload, *, seed: int) -> None:
    import torch

    directory.mkdir()
    shape.write(directory)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = random_model(directory, dtype=getattr(torch, workload.dtype), device=device, seed=seed)
    model.generation_config.eos_token_id = [1, *range(3, 2 + workload.end_tokens)]
    model.save_pretrained(directory)
    del model
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _write_tokenizer(directory: Path, size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"t{index}": index for index in range(3, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    wrapped.save_pretrained(directory)


def _write_prompts(path: Path, vocabulary: int, workload: PathWorkload, *, seed: int) -> None:
    import numpy as np

    rng = np.random.default_rng(seed)
    first = 3 + workload.end_tokens
    texts = rng.integers(first, vocabulary, size=(512, workload.prompt_tokens))
    rows = [{"prompt": " ".join(f"t{token}" for token in text), "answer": ""} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# -- hwrl ---------------------------------------------------------------------------------------------------------


def _run_hwrl(workload: PathWorkload, args: argparse.Namespace) -> dict[str, Any]:
    import yaml

    directory = Path(workload.directory)
    config_path = directory / "config.yaml"
    config_path.write_text(yaml.safe_dump(_config(workload, args)), encoding="utf-8")
    histories = train_in_turns(BenchPlan(("hwrl",), 1), config_path, {"hwrl": args.set}, scratch=directory)
    return _hwrl_row(histories["hwrl"][0])


def _config(workload: PathWorkload, args: argparse.Namespace) -> dict[str, Any]:
    directory = Path(workload.directory)
    return {
        "dir": str(directory / "run"),
        "seed": args.seed,
        "model": {"path": str(directory / "model"), "dtype": workload.dtype},
        "data": {"train": str(directory / "prompts.jsonl"), "max_prompt_tokens": workload.prompt_tokens},
        "reward": {"function": "hwrl_bench.whole_path:reward"},
        "rollout": {
            "engine": args.engine,
            "engine_options": args.options if args.engine != "embedded" else {},
            "n": workload.n,
            "max_new_tokens": workload.max_new_tokens,
            "max_running": workload.max_running,
            "threads": 4,
        },
        "train": {
            "steps": workload.steps,
            "batch_groups": workload.groups,
            "micro_batch_tokens": workload.tokens_per_pass,
            "threads": 4,
        },
        "async_training": {"staleness_threshold": workload.staleness},
    }


def _hwrl_row(history: History) -> dict[str, Any]:
    first, last = history[0], history[-1]
    return {
        **_rates(
            tokens=last["response/tokens_total"] - first["response/tokens_total"],
            seconds=last["time_s"] - first["time_s"],
            steps=len(history) - 1,
        ),
        "trainer_idle": _mean(history, "trainer/idle_ratio"),
        "rollout_idle": _mean(history, "rollout/idle_ratio"),
        "train_s": _mean(history, "timing_s/train"),
        "sync_s": _mean(history, "timing_s/sync"),
        "mean_length": _mean(history, "response/length_mean"),
    }


def _mean(history: History, name: str) -> float | None:
    values = [line[name] for line in history[1:] if name in line]
    return sum(values) / len(values) if values else None


def _rates(*, tokens: float, seconds: float, steps: int) -> dict[str, Any]:
    """Return the speed after the first step, which fills the pipeline: response tokens by wall time, on two devices."""
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_device": tokens / seconds / 2,
        "step_s": seconds / steps,
    }


# -- peers --------------------------------------------------------------------------------------------------------


def _run_peer(name: str, workload: PathWorkload, options: Mapping[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec(name) is None:
        return {"why_not": f"{name} is not installed"}
    result = Path(workload.directory) / f"{name}.json"
    request = {"workload": asdict(workload), "options": dict(options), "result": str(result)}
    command = [sys.executable, "-m", PEERS[name], json.dumps(request)]
    with contextlib.suppress(KeyboardInterrupt):
        done = subprocess.run(command, env={**os.environ}, check=False)
    if not result.exists():
        return {"why_not": f"it ended with status {done.returncode}"}
    steps: list[dict[str, float]] = json.loads(result.read_text(encoding="utf-8"))
    counted = steps[1:]
    return {
        **_rates(
            tokens=sum(step["tokens"] for step in counted),
            seconds=sum(step["seconds"] for step in counted),
            steps=len(counted),
        ),
        "steps": steps,
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the ways as text."""
    names = ("tokens_per_s", "tokens_per_s_per_device", "step_s")
    lines = [f"{'':<10}" + "".join(f"{name:>26}" for name in names)]
    lines += [
        f"{way:<10}" + "".join(f"{row[name]:>26,.3f}" for name in names)
        if "why_not" not in row
        else f"{way}: not measured: {row['why_not']}"
        for way, row in rows.items()
    ]
    mine: float = rows["hwrl"]["tokens_per_s"]
    lines += [f"hwrl / {way}: {mine / row['tokens_per_s']:.2f}" for way, row in _others(rows)]
    details = {name: value for name, value in rows["hwrl"].items() if name not in names}
    return "\n".join([*lines, f"hwrl: {details}"])


def _others(rows: Mapping[str, Mapping[str, Any]]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    return [(way, row) for way, row in rows.items() if way != "hwrl" and "why_not" not in row]
