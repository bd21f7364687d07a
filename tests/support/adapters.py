"""Adapters on the tiny model, and PEFT's own answers with them."""

from __future__ import annotations

from typing import Any

import torch

from hwrl.interfaces import GenerationRequest, LoraSettings
from hwrl.lora import adapter_name, add_adapter, base_name, save_adapter
from hwrl.rollout import EmbeddedEngine
from tests.support.tiny_model import END, generate, tiny_model

LORA = LoraSettings(rank=4, alpha=8.0)


Weights = dict[str, torch.Tensor]


def trained(seed: int, *, tied: bool = False) -> tuple[Weights, Weights]:
    """Return a base and an adapter that changes what it computes, as a trainer would send them."""
    model = add_adapter(tiny_model(seed, tied=tied), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    own = dict(model.named_parameters())
    adapter = {str(adapter_name(name)): own[name].detach() for name in own if adapter_name(name)}
    return {base_name(name): own[name].detach() for name in own if not adapter_name(name)}, adapter


def reference(base: Weights, adapter: Weights, directory: Any) -> Any:
    """Return PEFT's own model of the exported adapter on the base."""
    from peft import PeftModel

    save_adapter(directory, adapter, config=LORA.peft_config(), model_directory=directory)
    model = tiny_model(98)
    model.load_state_dict(base)
    return PeftModel.from_pretrained(model, str(directory))


def expected(model: Any, request: GenerationRequest) -> list[int]:
    prompt = torch.from_numpy(request.prompt_ids.astype("int64"))[None]
    tokens = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=END,
    )
    ids: list[int] = tokens[0, prompt.shape[1] :].tolist()
    return ids


def tokens_of(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[list[int]]:
    responses = generate(engine, requests)
    return [responses[request.request_id].token_ids.tolist() for request in requests]
