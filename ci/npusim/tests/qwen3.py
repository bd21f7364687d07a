"""Train a two-layer Qwen3 with AdamW and generate from it, on the CPU or on the simulated device: ``python qwen3.py DEVICE OUT``.

Losses, gradient norms, tokens and the final parameters go to OUT (torch.save), for the caller to compare.
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def main(device: str, out: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Qwen3ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    losses, norms = [], []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    generated = model.generate(tokens[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0)
    parameters = {key: value.cpu() for key, value in model.state_dict().items()}
    torch.save({"losses": losses, "norms": norms, "generated": generated.cpu(), "parameters": parameters}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
