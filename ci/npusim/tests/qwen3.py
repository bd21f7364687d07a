"""A two-layer Qwen3 that is trained with AdamW and generates."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

STEPS = 3
CONFIG = Qwen3Config(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def train_and_generate(device: str, out: Path) -> None:
    """Save losses, gradient norms, the tokens generated and the final parameters to ``out``, on the CPU."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    generated = model.generate(tokens[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0)
    parameters = {key: value.cpu() for key, value in model.state_dict().items()}
    torch.save({"losses": losses, "norms": norms, "generated": generated.cpu(), "parameters": parameters}, out)
