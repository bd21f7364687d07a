"""A cold start: a base model learns the form of the answers from solved problems, before RL.

``python cold_start.py MODEL DIR`` trains MODEL, a name on the hub or a directory, on the first rows of train.jsonl with
their solutions, and writes it to DIR.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from chain_sum import ASK, solution  # type: ignore[import-not-found] # beside this file, where both were written
from transformers import AutoModelForCausalLM, AutoTokenizer

import hwrl

ROWS, ROWS_OF_A_STEP, LEARNING_RATE = 256, 8, 2e-5
END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(source: str, target: Path) -> None:
    """Train ``source`` and write it to ``target``."""
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    tokenizer.eos_token = END
    device = hwrl.get_backend().device()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False).to(device)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with Path("train.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, ROWS)]
    for first in range(0, len(rows), ROWS_OF_A_STEP):
        losses = []
        for row in rows[first : first + ROWS_OF_A_STEP]:
            text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            problem = row["prompt"][-1]["content"].removeprefix(ASK).removesuffix(" =")
            answer = tokenizer.encode(solution(problem) + END, add_special_tokens=False)
            tokens = torch.tensor([prompt + answer], device=device)
            loss = model(tokens, labels=torch.tensor([[-100] * len(prompt) + answer], device=device)).loss
            (loss / ROWS_OF_A_STEP).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {first // ROWS_OF_A_STEP + 1}: loss {sum(losses) / len(losses):.3f}")
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
