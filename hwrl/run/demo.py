"""The demo: data, a tokenizer and a tiny model, created from a seed. The model learns to sort digits.

A prompt is a few digits and ``>``; the answer is the digits in order. ``python -m hwrl.run.demo DIR`` writes all files
for ``hwrl train DIR/config.yaml``. Nothing large is imported at the top of this module, because each reward process
imports it for :func:`sort_reward`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ALPHABET = ["<pad>", "<eos>", "<bos>", *"0123456789", ">", "<unused1>", "<unused2>"]
"""16 tokens. With such a small vocabulary, random answers are sometimes partly right."""

DemoRow = dict[str, str | int]


def sort_reward(prompt: str, response: str, answer: str) -> dict[str, float]:
    """Return the share of correct positions, counting the end of the answer as one, and whether all are correct.

    >>> sort_reward("21>", "12", "12")
    {'reward': 1.0, 'exact': 1.0}
    >>> sort_reward("21>", "11", "12")["reward"]
    0.6666666666666666
    """
    right = sum(actual == expected for actual, expected in zip(response, answer, strict=False))
    right += len(response) == len(answer)
    return {"reward": right / (len(answer) + 1), "exact": float(response == answer)}


def write_demo(
    directory: Path,
    *,
    seed: int,
    digits: Sequence[int] = (4,),
    prompts: int = 8192,
    hidden: int = 64,
    layers: int = 2,
    experts: int = 0,
) -> Path:
    """Write data, model and configuration to ``directory``; return the configuration's path.

    ``digits`` lists the lengths of the prompts; all lengths are equally likely. ``prompts`` training prompts are
    written, and 512 other prompts for evaluation. Raises ValueError if fewer different texts of these lengths exist.

    The model has ``layers`` layers of width ``hidden``, which must be a multiple of 32. With ``experts`` it is a
    mixture of that number of experts, and each token uses two of them.
    """
    import numpy as np

    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = list(_distinct_rows(rng, digits=digits, count=prompts + 512))
    write_lines(directory / "train.jsonl", rows[512:])
    write_lines(directory / "eval.jsonl", rows[:512])
    write_model(directory / "model", alphabet=ALPHABET, seed=seed, hidden=hidden, layers=layers, experts=experts)
    return write_config(directory, _config(directory, seed=seed, longest=max(digits)))


def write_config(directory: Path, config: Mapping[str, object]) -> Path:
    """Write ``config`` to ``config.yaml`` in ``directory``, and return the path of the file."""
    import yaml

    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def _distinct_rows(rng: np.random.Generator, *, digits: Sequence[int], count: int) -> Iterator[DemoRow]:
    existing = sum(10**length for length in set(digits))
    if count > existing:
        raise ValueError(
            f"{count:,} different prompts are needed, but only {existing:,} have {sorted(set(digits))} digits"
        )
    seen: set[str] = set()
    while len(seen) < count:
        text = "".join(str(digit) for digit in rng.integers(0, 10, size=int(rng.choice(digits))))
        if text not in seen:
            seen.add(text)
            yield {"prompt": text + ">", "answer": "".join(sorted(text)), "max_new_tokens": len(text) + 1}


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write ``rows`` to ``path`` as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(
    directory: Path, *, alphabet: Sequence[str], seed: int, hidden: int = 64, layers: int = 2, experts: int = 0
) -> None:
    """Write a Qwen3 model with random weights, and its tokenizer. The demo's model has 100,800 parameters.

    ``alphabet`` is the vocabulary: the three special tokens of ALPHABET, and then characters or longer texts.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    mixture = {"num_experts": experts, "num_experts_per_tok": min(2, experts), "moe_intermediate_size": hidden}
    mixture |= {"norm_topk_prob": True}
    config = CONFIG_MAPPING["qwen3_moe" if experts else "qwen3"](
        **(mixture if experts else {}),
        vocab_size=len(alphabet),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        tie_word_embeddings=False,
        pad_token_id=alphabet.index("<pad>"),
        eos_token_id=alphabet.index("<eos>"),
        bos_token_id=alphabet.index("<bos>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.save_pretrained(directory)
    _write_tokenizer(directory, alphabet)


def _write_tokenizer(directory: Path, alphabet: Sequence[str]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token="<pad>"))
    longest_first = sorted(alphabet, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", alphabet.index("<bos>"))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(directory)


def _config(directory: Path, *, seed: int, longest: int) -> dict[str, object]:
    """Return the demo's settings. docs/benchmarks.md has results for several seeds and settings."""
    return {
        "dir": str(directory / "run"),
        "seed": seed,
        # Runs that stopped learning ended with an exact match of 0.58 to 0.66, and all others with 0.83 or more.
        "goals": {"reward/mean": 0.9, "eval/exact": 0.75},
        "model": {"path": str(directory / "model")},
        "data": {
            "train": str(directory / "train.jsonl"),
            "eval": str(directory / "eval.jsonl"),
            "max_prompt_tokens": longest + 2,
        },
        "reward": {"function": "hwrl.run.demo:sort_reward"},
        "rollout": {"n": 16, "max_new_tokens": longest + 1, "max_running": 256},
        "train": {"steps": 500, "batch_groups": 32},
        # Without it some runs stop learning: entropy falls before the model can sort (docs/benchmarks.md).
        "algorithm": {"entropy_coeff": 0.05},
        "optimizer": {"learning_rate": 7e-4, "warmup_steps": 10, "min_learning_rate_ratio": 0.05},
        "async_training": {"staleness_threshold": 1},  # with 2, 1 of 7 runs without that term stopped learning
        "checkpoint": {"save_every_steps": 100},
        "eval": {"every_steps": 100, "prompts": 512},
    }


def main() -> None:
    """Write the demo and print the path of its configuration. Refuse if a run is active in the directory."""
    from hwrl.checkpoint import find_owner

    parser = argparse.ArgumentParser(prog="python -m hwrl.run.demo", description=write_demo.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--experts", type=int, default=0, help="make a mixture of this number of experts, two per token"
    )
    args = parser.parse_args()
    if (owner := find_owner(args.directory / "run")) is not None:
        sys.exit(f"hwrl: a run is active in {args.directory / 'run'}: {owner}; end it, or choose another directory")
    print(write_demo(args.directory, seed=args.seed, experts=args.experts))


if __name__ == "__main__":
    main()
