"""One process of ``hwrl bench rollout``: it generates by one way. Its arguments are two files of JSON.

The first is the work, from :func:`hwrl_bench.rollout.workload_of` and one of ``hwrl_bench.rollout.WAYS``. The process
writes the second: tokens and seconds of each round, or ``why_not``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl import get_backend
from hwrl.discovery import engine_args, process_env
from hwrl_bench.device import device_name
from hwrl_bench.ways import BenchPlan, Way, one_line

if TYPE_CHECKING:
    from hwrl.interfaces import GenerationRequest, RolloutEngine, RolloutSettings

_WARM_UP_TOKENS = 8
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its first use compiles kernels for minutes; for top-k and top-p only
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has a thread
}
_NO_REUSE = {"enable_prefix_caching": False}  # each round has the same prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the result. The session of this process ends when its standard input does."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.environ |= {**_ENVIRONMENT, **process_env("rollout"), **os.environ}
    asked, answer = map(Path, sys.argv[1:] if arguments is None else arguments)
    try:
        row = measure(json.loads(asked.read_text()))
    except Exception as exc:  # noqa: BLE001 - vLLM may fail in any way; the table shows the reason
        row = {"why_not": one_line(exc)}
    answer.write_text(json.dumps(row))
    return 0


def _end_with_input() -> None:
    os.read(0, 1)  # its other end is the benchmark's: a killed one leaves no process on the device
    os.killpg(os.getpgrp(), signal.SIGKILL)


def measure(workload: dict[str, Any]) -> dict[str, Any]:
    """Generate all responses in each round, after a round of short ones; return tokens and seconds of each."""
    begin = time.perf_counter()
    way = KINDS[workload["kind"]](workload)
    start_s = time.perf_counter() - begin
    lengths = workload["responses"]
    plan = BenchPlan((workload["kind"],), workload["rounds"], warm_up=1)

    def generate(_: str, number: int) -> tuple[int, float]:
        begin = time.perf_counter()
        tokens = way.generate(lengths if number else [min(length, _WARM_UP_TOKENS) for length in lengths])
        return tokens, time.perf_counter() - begin

    (rows,) = plan.take_turns(generate).values()
    way.close()
    tokens, seconds = map(list, zip(*rows, strict=True))
    return {"tokens": tokens, "seconds": seconds, "start_s": start_s, "device": device_name(get_backend())}


class GenerationWay(Way, ABC):
    """A way to generate responses of given lengths to random prompts."""

    def __init__(self, workload: dict[str, Any]) -> None:
        import numpy as np

        size = (len(workload["responses"]), workload["prompt"])
        self.prompts = np.random.default_rng(0).integers(3, workload["vocabulary"], size=size).astype(np.int32)

    @abstractmethod
    def generate(self, lengths: Sequence[int]) -> int:
        """Generate a response of each length; return the number of generated tokens."""


class VllmWay(GenerationWay):
    """A way with vLLM."""

    package, module = "vLLM", "vllm"


class LlmGeneration(VllmWay):
    """vLLM's ``LLM.generate``: its engine core in a process of its own, or, ``inline``, in this one."""

    def __init__(self, workload: dict[str, Any]) -> None:
        super().__init__(workload)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if workload["inline"] else "1"
        from vllm import LLM

        inline = {"async_scheduling": False} if workload["inline"] else {}  # vLLM's default is on
        self._llm = LLM(
            model=workload["directory"],
            dtype=workload["dtype"],
            load_format="dummy",
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",  # the work of hwrl's way
            max_num_seqs=workload["max_running"],
            max_model_len=workload["max_length"],
            **engine_args("vllm", {**_NO_REUSE, **inline, **workload["options"]}),
        )

    def generate(self, lengths: Sequence[int]) -> int:
        from vllm import SamplingParams

        how = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for length in lengths
        ]
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in self.prompts]
        outputs = self._llm.generate(prompts, how, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class EngineGeneration(GenerationWay):
    """An engine of hwrl, submitted up to its capacity and stepped, with the weights of a random model."""

    def __init__(self, workload: dict[str, Any]) -> None:
        super().__init__(workload)
        import torch

        from hwrl.interfaces import RolloutSettings

        dtype = getattr(torch, workload["dtype"])
        settings = RolloutSettings(
            model_directory=Path(workload["directory"]),
            dtype=dtype,
            eos_ids=[],
            max_running=workload["max_running"],
            max_length=workload["max_length"],
        )
        self._engine = self._make(settings, workload["options"])
        self._load_random_weights(Path(workload["directory"]), dtype)
        self._submitted = 0

    @abstractmethod
    def _make(self, settings: RolloutSettings, options: dict[str, Any]) -> RolloutEngine:
        """Return the engine, without weights."""

    def _load_random_weights(self, directory: Path, dtype: Any) -> None:
        from hwrl.saved_names import saved_weights
        from hwrl_bench.models import random_model

        backend = get_backend()
        weights, _ = saved_weights(random_model(directory, dtype=dtype, device=backend.device()))
        self._engine.load_weights(weights.items(), version=0)
        del weights
        backend.empty_cache()

    def generate(self, lengths: Sequence[int]) -> int:
        return generate_all(self._engine, self._requests(lengths))

    def close(self) -> None:
        self._engine.close()

    def _requests(self, lengths: Sequence[int]) -> list[GenerationRequest]:
        from hwrl.interfaces import GenerationRequest, Sampling

        first, self._submitted = self._submitted, self._submitted + len(lengths)
        return [
            GenerationRequest(first + number, prompt, Sampling(length, 1.0))
            for number, (prompt, length) in enumerate(zip(self.prompts, lengths, strict=True))
        ]


class VllmGeneration(EngineGeneration, VllmWay):
    """hwrl's engine on vLLM."""

    def _make(self, settings: RolloutSettings, options: dict[str, Any]) -> RolloutEngine:
        from hwrl_vllm import VllmEngine

        return VllmEngine(settings, options={**_NO_REUSE, **options}, backend=get_backend())


class EmbeddedGeneration(EngineGeneration):
    """hwrl's engine on transformers."""

    def _make(self, settings: RolloutSettings, options: dict[str, Any]) -> RolloutEngine:
        from hwrl.rollout import EmbeddedEngine

        return EmbeddedEngine.from_settings(settings, backend=get_backend())


KINDS: dict[str, type[GenerationWay]] = {
    "llm": LlmGeneration,
    "vllm": VllmGeneration,
    "embedded": EmbeddedGeneration,
}


def generate_all(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> int:
    """Generate every response, with as many at once as ``engine`` has places for; return the number of tokens."""
    waiting, tokens = list(requests), 0
    while waiting or engine.pending():
        room = min(len(waiting), engine.capacity())
        if room > 0:
            engine.submit(waiting[:room])
            waiting = waiting[room:]
        tokens += sum(len(done.response.token_ids) for done in engine.step())
    return tokens


if __name__ == "__main__":
    raise SystemExit(main())
