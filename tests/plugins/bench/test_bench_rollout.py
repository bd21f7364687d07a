"""hwrl bench rollout with the engine on transformers; with vLLM it is in tests/plugins/vllm."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hwrl.cli import main
from hwrl.interfaces import Completion
from hwrl.rollout import EmbeddedEngine
from hwrl_bench.rollout import compare, configure, run_alone, summarize, workload_of
from hwrl_bench.rollout_process import generate_all, measure
from hwrl_bench.train_rows import RaggedRows
from tests.support.tiny_model import requests_of, tiny_model


def test_the_workload_of_every_way_names_the_length_of_each_response(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    work = workload_of(parser.parse_args(["--model", "1.7b", "--rounds", "2"]), {"enforce_eager": True}, tmp_path)
    lengths = work.pop("responses")
    assert len(lengths) == 512 and 225 <= sum(lengths) / 512 <= 255 and max(lengths) <= 1024 - 128
    assert lengths == RaggedRows(512, mean=240, longest=1024).responses()
    sizes = {"vocabulary": 151936, "prompt": 128, "max_length": 1024, "max_running": 256, "rounds": 2}
    assert work == {**sizes, "directory": str(tmp_path), "dtype": "bfloat16", "options": {"enforce_eager": True}}


def test_an_engine_gets_requests_up_to_its_capacity_and_every_token_counts() -> None:
    class Counting(EmbeddedEngine):
        most = 0

        def step(self) -> list[Completion]:
            self.most = max(self.most, self.pending())
            return super().step()

    requests = requests_of(9, temperature=1.0)
    engine = Counting(tiny_model(), eos_ids=[], max_running=4, max_length=32)
    engine.version = 0
    assert generate_all(engine, requests) == sum(request.sampling.max_new_tokens for request in requests)
    assert engine.most == 4 and engine.pending() == 0


class FakeLlm:
    """Generates as many zeros as a request may have, like vLLM's class of this role; keeps its arguments."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **arguments: Any) -> None:
        self.made.append(arguments | {"processes": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]})

    def generate(self, prompts: list[dict[str, list[int]]], how: list[SimpleNamespace], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm and all(each.ignore_eos and each.logprobs == 0 and not each.detokenize for each in how)
        assert all(len(prompt["prompt_token_ids"]) == 8 for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * each.max_tokens)]) for each in how]


def test_vllms_own_generation_gets_the_options_and_one_process_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLlm, SamplingParams=SimpleNamespace))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "2")
    work = {"directory": "d", "dtype": "float32", "vocabulary": 9, "prompt": 8, "responses": [3, 20], "rounds": 2}
    work |= {"kind": "llm", "max_length": 30, "max_running": 2, "options": {"enforce_eager": True}}
    rows = [measure({**work, "inline": inline}) for inline in (False, True)]
    assert all(row["tokens"] == [23, 23] and len(row["seconds"]) == 2 for row in rows)
    apart, inline = FakeLlm.made
    assert apart["processes"] == "1" and inline["processes"] == "0"
    assert "async_scheduling" not in apart and inline["async_scheduling"] is False
    assert apart["logprobs_mode"] == "processed_logprobs", "the same work as hwrl's way"
    assert apart["enforce_eager"] and not apart["enable_prefix_caching"] and apart["max_num_seqs"] == 2


def test_rates_are_of_each_round_and_compared_with_the_first_way() -> None:
    first = summarize({"tokens": [100, 100, 100], "seconds": [1.0, 2.0, 4.0], "device": "d", "start_s": 1.0})
    assert first["tokens_per_s"] == 50.0 and first["best_tokens_per_s"] == 100.0
    other = summarize({"tokens": [100], "seconds": [2.5], "device": "d", "start_s": 1.0})
    result = {"ways": {"a": {"why_not": "no"}, "b": first, "c": other}}
    compare(result)
    assert first["of_first"] == 1.0 and other["of_first"] == 0.8 and other["best_of_first"] == 0.4


def test_a_process_is_killed_at_its_deadline_and_a_failed_one_says_so() -> None:
    assert run_alone("http.server", "0", timeout_s=1.0) == "it took longer than 1 s"
    assert run_alone("hwrl_bench.no_such_module", timeout_s=600.0) == "its process ended with exit code 1"
    assert run_alone("timeit", "-n", "1", timeout_s=600.0) is None


def test_the_process_of_a_way_ends_with_its_benchmark() -> None:
    command = [sys.executable, "-c", "from hwrl_bench import rollout_process as r; r._end_with_input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.stdin.close()
    assert process.wait(600) == -signal.SIGKILL


def test_the_command_measures_an_engine_and_names_what_it_could_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests use the cores, too
    target, wants_vllm = tmp_path / "bench.json", importlib.util.find_spec("vllm") is None
    ways = ["hwrl embedded", *(["LLM.generate"] if wants_vllm else [])]
    sizes = "--requests 6 --prompt 8 --mean 16 --longest 48 --max-running 4 --rounds 2 --dtype float32"
    assert main(["bench", "rollout", "--ways", *ways, *sizes.split(), "--json", str(target)]) == int(wants_vllm)
    result = json.loads(target.read_text())
    row = result["ways"]["hwrl embedded"]
    assert row["tokens"] == [sum(RaggedRows(6, 16, 48, 8).responses())] * 2 and row["of_first"] == 1.0
    assert row["best_tokens_per_s"] >= row["tokens_per_s"] > 0 and result["hardware"]["cores"] >= 1
    printed = capsys.readouterr().out
    assert "best of first" in printed
    assert not wants_vllm or "LLM.generate: not measured: vLLM is not installed" in printed
