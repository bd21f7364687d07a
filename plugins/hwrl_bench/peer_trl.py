"""TRL's asynchronous GRPO on the workload of ``hwrl bench path``: a trainer and a vLLM server, on a device each.

``python -m hwrl_bench.peer_trl REQUEST`` with the request as JSON. TRL trains float32 weights under bfloat16 autocast,
like hwrl's float32 masters. Its attention kernel comes from a network; without one, torch's kernel replaces it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hwrl import get_backend

_PORT = 8123
_PLAIN_TEXT = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bos>",
    "fields": {"content": {"close_pattern": "$", "content": "text"}},
}
"""A response is text and nothing else: TRL knows the schemas of published chat templates only."""


def even_words(completions: list[Any], **_: Any) -> list[float]:
    """TRL's form of the workload's reward."""
    from hwrl_bench.whole_path import reward

    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [reward("", text, "") for text in texts]


def main(request: dict[str, Any]) -> None:
    """Start the server, train, and write tokens and seconds of each step to ``request["result"]``."""
    workload = SimpleNamespace(**request["workload"])
    devices = get_backend().devices
    server = _start_server(workload, request["options"], env={**os.environ, **devices.render([1])})
    try:
        os.environ |= devices.render([0])
        steps = _train(workload)
    finally:
        server.terminate()
        server.wait(timeout=60)
    Path(request["result"]).write_text(json.dumps(steps), encoding="utf-8")


def _start_server(workload: Any, options: dict[str, Any], *, env: dict[str, str]) -> subprocess.Popen[bytes]:
    arguments = {
        "model": f"{workload.directory}/model",
        "port": _PORT,
        "dtype": workload.dtype,
        "max-model-len": workload.prompt_tokens + workload.max_new_tokens,
        "max-num-seqs": workload.max_running,
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": "nccl"}),
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    words = [
        word
        for name, value in arguments.items()
        if value is not False
        for word in ([f"--{name}"] if value is True else [f"--{name}", _text(value)])
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    return subprocess.Popen(command, env={**env, "VLLM_SERVER_DEV_MODE": "1"})


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _train(workload: Any) -> list[dict[str, float]]:
    from transformers import AutoTokenizer

    datasets = importlib.import_module("datasets")
    module = importlib.import_module("trl.experimental.async_grpo")
    _use_torch_attention()
    per_step = workload.groups * workload.n
    passes = -(-per_step * _mean_tokens(workload) // workload.tokens_per_pass)
    on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True, "bf16": False}
    config = module.AsyncGRPOConfig(
        output_dir=f"{workload.directory}/trl",
        max_steps=workload.steps,
        per_device_train_batch_size=-(-per_step // passes),
        gradient_accumulation_steps=passes,
        token_budget=workload.tokens_per_pass,
        num_generations=workload.n,
        max_completion_length=workload.max_new_tokens,
        max_staleness=workload.staleness,
        max_inflight_tasks=workload.max_running,
        gradient_checkpointing=False,
        vllm_server_base_url=f"http://localhost:{_PORT}",
        save_strategy="no",
        report_to=[],
        **on_cpu,
    )
    directory = Path(workload.directory)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.response_template = _PLAIN_TEXT
    trainer = module.AsyncGRPOTrainer(
        model=str(directory / "model"),
        args=config,
        reward_funcs=even_words,
        train_dataset=datasets.Dataset.from_list(_conversations(directory / "prompts.jsonl")),
        processing_class=tokenizer,
    )
    trainer.train()
    return [
        {"tokens": line["batch/trained_tokens_per_step"], "seconds": line.get("perf/step_s") or 0.0}
        for line in trainer.state.log_history
        if "batch/trained_tokens_per_step" in line
    ]


def _conversations(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]


def _mean_tokens(workload: Any) -> int:
    """Return the mean length of prompt and response; both sides share it, as all weights are random."""
    config = json.loads(Path(workload.directory, "model", "config.json").read_text(encoding="utf-8"))
    share: float = workload.end_tokens / config["vocab_size"]
    prompt_tokens: int = workload.prompt_tokens
    return prompt_tokens + int((1 - (1 - share) ** workload.max_new_tokens) / share)


def _use_torch_attention() -> None:
    """Give TRL torch's attention over variable lengths in place of the kernel that it would download."""
    if importlib.util.find_spec("kernels") is not None:
        return
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    causal: dict[str, Any] = {"window_size": (-1, 0)}
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        causal = {"is_causal": True}

    def attend(
        query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, softmax_scale: Any, **_: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, scale=softmax_scale, **causal)

    packing: Any = importlib.import_module("trl.experimental.async_grpo.packing")
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
