"""Real vLLM on the chosen backend, and transformers' model beside it that says what it must generate."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hwrl.discovery import engine_args, get_backend
from hwrl.errors import ConfigError
from hwrl.interfaces import GenerationRequest, LoraSettings, Response, RolloutEngine, RolloutSettings, Sampling
from hwrl.lora import add_adapter
from hwrl.saved_names import saved_weights
from hwrl_vllm.engine import VllmEngine


def _serves(**given: Any) -> bool:
    """Return whether the device has an engine with this setting. vLLM itself takes all of them."""
    dtype, options = given.pop("dtype", torch.bfloat16), {"enforce_eager": True, **given}
    settings = RolloutSettings(model_directory=Path(), dtype=dtype, eos_ids=[], max_running=1, max_length=1)
    try:
        engine_args("vllm", options, settings=settings)
    except ConfigError:
        return False
    return True


END = 1
ON_HOST = get_backend().info.device_type == "cpu"
BLOCK = 32 if _serves(block_size=32) else 128
LONGEST = 4 * BLOCK
IS_WIDE = _serves(dtype=torch.float32)
DTYPE = torch.float32 if IS_WIDE else torch.bfloat16
ON_DEVICE_OPTIONS: dict[str, Any] = {"gpu_memory_utilization": 0.1}
"""Other tests may use the device, too."""
if IS_WIDE:
    ON_DEVICE_OPTIONS["attention_config"] = {"backend": "TRITON_ATTN"}  # it knows float32
# On a device attention multiplies float32 with fewer bits, and adapters are bfloat16.
CLOSE = 0.5 if not IS_WIDE else 1e-4 if ON_HOST else 5e-2
LORA_DTYPE, LORA_CLOSE = (torch.float32, CLOSE) if ON_HOST else (torch.bfloat16, 0.5)
Weights = dict[str, torch.Tensor]
_request_ids = itertools.count()


class Policy:
    """transformers' model, whose random weights the engine is to serve; with an adapter if there is ``lora``."""

    def __init__(self, directory: Path, *, lora: LoraSettings | None = None) -> None:
        dtype, self._close = (DTYPE, CLOSE) if lora is None else (LORA_DTYPE, LORA_CLOSE)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        if lora is not None:
            self.model = add_adapter(self.model, lora)
        self._random = torch.Generator().manual_seed(0)

    def change(self) -> Weights:
        """Take other weights, and return them; far from uniform, so that a wrong one changes the greedy tokens."""
        base, _ = self._change("")
        return base

    def change_adapter(self) -> Weights:
        """Take other weights in the adapter alone, and return them."""
        _, adapter = self._change(".lora_")
        return adapter

    @torch.no_grad()
    def _change(self, part: str) -> tuple[Weights, Weights]:
        for name, parameter in self.model.named_parameters():
            if part in name:
                noise = torch.empty_like(parameter).normal_(generator=self._random)
                parameter.copy_(0.3 * noise + (1 if "norm" in name else 0))
        base, adapter = saved_weights(self.model)
        return _sent(base), _sent(adapter)

    def logits(self, prompt_ids: Any, response: Response) -> torch.Tensor:
        """Return those of the response's places, in one forward pass."""
        tokens = torch.from_numpy(np.concatenate([prompt_ids, response.token_ids]).astype(np.int64))
        with torch.no_grad():
            return self.model(tokens[None]).logits[0, len(prompt_ids) - 1 : -1].float()  # type: ignore[no-any-return] # not followed

    def logprobs(self, prompt_ids: Any, response: Response, *, temperature: float) -> Any:
        logprobs = (self.logits(prompt_ids, response) / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.from_numpy(response.token_ids.astype(np.int64))[:, None])[:, 0].numpy()

    def check_greedy(self, requests: Sequence[GenerationRequest], responses: dict[int, Response]) -> None:
        for request in requests:
            response = responses[request.request_id]
            logits, close = self.logits(request.prompt_ids, response), self._close
            if self.model.dtype is torch.bfloat16:  # the engine may be as far from exact numbers as transformers is
                rounding = (logits - self._exact_logits(request.prompt_ids, response)).abs().max().item()
                close = max(close, 2 * rounding)
            chosen = logits.gather(1, torch.from_numpy(response.token_ids.astype(np.int64))[:, None])[:, 0]
            behind = (logits.max(-1).values - chosen).max().item()
            assert behind <= (0.0 if ON_HOST else close), f"{behind} behind the greedy token"
            wanted = self.logprobs(request.prompt_ids, response, temperature=1.0)
            np.testing.assert_allclose(response.logprobs, wanted, atol=close)

    def _exact_logits(self, prompt_ids: Any, response: Response) -> torch.Tensor:
        """Return :meth:`logits` of the same weights, computed in float32."""
        model, self.model = self.model, copy.deepcopy(self.model).float()
        try:
            return self.logits(prompt_ids, response)
        finally:
            self.model = model


def _sent(weights: Weights) -> Weights:
    return {name: tensor.to(get_backend().device(), copy=True) for name, tensor in weights.items()}


def write_model(directory: Path, form: str, **settings: Any) -> None:
    """Write a small model of another form than the demo's, which transformers calls ``form``."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {} if form == "gpt2" else {"intermediate_size": 128, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": END, "tie_word_embeddings": False}
    config = AutoConfig.for_model(form, max_position_embeddings=LONGEST, **sizes, **ends, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def engine_of(
    model_directory: Path,
    *,
    lora: LoraSettings | None = None,
    free_cache_engine: bool = False,
    tensor_parallel: int = 1,
    temperature: float = 1.0,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    max_length: int = LONGEST,
    **options: Any,
) -> VllmEngine:
    settings = RolloutSettings(
        model_directory=model_directory,
        dtype=DTYPE if lora is None else LORA_DTYPE,
        eos_ids=[END],
        max_running=16,
        max_length=max_length,
        sampling=Sampling(1, temperature, **sampling),
        lora=lora,
        free_cache_engine=free_cache_engine,
        tensor_parallel=tensor_parallel,
    )
    options = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "block_size": BLOCK, **options}
    if ON_HOST:
        _schedule_asynchronously()
    else:
        options |= ON_DEVICE_OPTIONS
    return VllmEngine(settings, options=options, backend=get_backend())


@functools.cache
def _schedule_asynchronously() -> None:
    """Let an inline engine core schedule as on devices: vLLM for CPUs can, but turns it off."""
    from vllm import EngineArgs

    create = EngineArgs.create_engine_config

    def create_asynchronous(*args: Any, **options: Any) -> Any:
        config = create(*args, **options)
        config.scheduler_config.async_scheduling = True
        return config

    EngineArgs.create_engine_config = create_asynchronous


def requests_of(count: int, *, temperature: float = 0.0, prompt: int = 6, new: int = 12) -> list[GenerationRequest]:
    """Return requests whose random prompts have ``prompt`` tokens, and whose responses may have ``new``."""
    rng = np.random.default_rng(prompt)
    return [
        GenerationRequest(
            next(_request_ids), rng.integers(2, 16, size=prompt).astype(np.int32), Sampling(new, temperature)
        )
        for _ in range(count)
    ]


def finish(engine: RolloutEngine) -> dict[int, Response]:
    responses = {}
    while engine.pending():
        responses.update({done.request_id: done.response for done in engine.step()})
    return responses


def generate(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[int, Response]:
    engine.submit(requests)
    return finish(engine)
