"""TRL's trainers send their weights through hwrl to a real ``vllm serve``, on the CPU."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        not (importlib.util.find_spec("trl") and importlib.util.find_spec("vllm")),
        reason="TRL or vLLM is not installed: ci/stack trl",
    ),
    pytest.mark.filterwarnings("default"),  # of TRL and vLLM
]

PAGE = Path(__file__).parents[3] / "docs" / "trl.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server of the demo's tiny model, and the model's directory."""
    from hwrl_trl.demo import tiny_policy
    from tests.plugins.vllm.vllm_server import vllm_server

    home = tmp_path_factory.mktemp("server")
    for part in tiny_policy():
        part.save_pretrained(home / "model")
    with vllm_server(home / "model", home / "log", "--logprobs-mode", "processed_logprobs") as serving:
        yield serving.url, home / "model"


PLAIN: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "use_cpu": True}


def test_the_example_of_the_page_learns_with_responses_of_the_server(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's log-probabilities are those of the trainer's newest weights, in every step."""
    monkeypatch.chdir(tmp_path)
    _, block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block.replace("http://localhost:8000", server[0]), "trl.md", "exec"), names)
    log = [entry for entry in names["trainer"].state.log_history if "reward" in entry]
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in log) < 1e-4
    assert log[0]["reward"] < 0.15 and log[-1]["reward"] > 0.3


def test_asynchronous_grpo_learns_with_weight_transfer(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packed attention needs a kernel for a device; here a plain one stands in for it."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from hwrl_trl import AsyncWeights
    from hwrl_trl.demo import share_of_sevens, tiny_policy

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attend))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)
    url, model_directory = server
    _, tokenizer = tiny_policy()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<pad>",
        "fields": {"content": {"close_pattern": "$", "content": "text"}},
    }
    rows = [{"prompt": [{"role": "user", "content": f"{first} 2"}]} for first in range(10)]
    trainer = AsyncGRPOTrainer(
        model=str(model_directory),
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path),
            max_steps=12,
            learning_rate=1e-2,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            max_staleness=1,
            logging_steps=1,
            vllm_server_base_url=url,
            gradient_checkpointing=False,
            bf16=False,
            **PLAIN,
        ),
        reward_funcs=share_of_sevens,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        weight_transfer=AsyncWeights(url),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[0] < 0.15 and max(rewards) > 0.25
    trainer.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = trainer.model.eval()(torch.tensor([[1, 2]])).logits[0, -1]
    assert logprob_of_seven(url, str(model_directory)) == pytest.approx(logits.log_softmax(-1)[7].item(), abs=1e-4)


def logprob_of_seven(url: str, model: str) -> float:
    """Return the log-probability of 7 after 1 and 2 on the server, which got the newest weights after the last step."""
    body = {"model": model, "prompt": [1, 2, 7], "max_tokens": 1, "prompt_logprobs": 12}
    from tests.plugins.vllm.vllm_server import VllmServer

    answer: Any = VllmServer(url).post("v1/completions", body)
    value: float = answer["choices"][0]["prompt_logprobs"][2]["7"]["logprob"]
    return value


def attend(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any
) -> torch.Tensor:
    """Attention of each segment to the keys before its last token; tensors are (tokens, heads, head dimension)."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    attention = torch.nn.functional.scaled_dot_product_attention
    parts = []
    for (begin_q, end_q), (begin_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        q = query[begin_q:end_q].transpose(0, 1)
        k, v = (tensor[begin_k:end_k].transpose(0, 1) for tensor in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        parts.append(attention(q, k, v, attn_mask=seen, scale=softmax_scale))
    return torch.cat(parts, 1).transpose(0, 1)
