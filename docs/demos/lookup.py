"""A demo of several turns: the policy looks values up with a tool before it answers.

A prompt is a few letters and ``>``. Each letter stands for a digit, drawn anew for every prompt, and only the tool
knows it. A turn that begins with a letter of the prompt asks the tool, which replies with the digit and ``>``. Any
other turn is the answer: the digits in the prompt's order. ``python docs/demos/lookup.py DIR`` writes all files for
``hwrl train DIR/config.yaml``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from hwrl.run.demo import write_config, write_lines, write_model

LETTERS, DIGITS = "abcd", "01234"
ALPHABET = ["<pad>", "<eos>", "<bos>", *DIGITS, ">", *LETTERS, "<unused1>", "<unused2>", "<unused3>"]
"""16 tokens."""


class Lookup:
    """The environment of one prompt, a :class:`~hwrl_workflows.TextEnvironment` with coroutines.

    A first question about a letter of the prompt earns 0.15. The answer earns the share of its correct digits, up to
    the rest of 1.
    """

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Take the digits of the row's letters."""
        assert options is not None, "the row has the digits"
        self._answer: str = options["answer"]
        self._digits = dict(zip(options["letters"], self._answer, strict=True))
        self._unasked = set(self._digits)
        return "", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a question, or judge the answer."""
        letter = action[:1]
        if letter in self._digits:
            reward = 0.15 if letter in self._unasked else 0.0
            self._unasked.discard(letter)
            return f"{self._digits[letter]}>", reward, False, False, {"exact": 0.0}
        right = sum(actual == expected for actual, expected in zip(action, self._answer, strict=False))
        right -= max(0, len(action) - len(self._answer))  # digits too many
        share = max(0.0, right / len(self._answer))
        exact = float(action == self._answer)
        return "", (1 - 0.15 * len(self._answer)) * share, True, False, {"exact": exact}


def write_lookup(directory: Path, *, seed: int, letters: int = 1, prompts: int = 8192) -> Path:
    """Write data, model and configuration to ``directory``; return the configuration's path.

    A prompt has ``letters`` letters, so the policy needs ``letters`` + 1 turns.
    """
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    rows = [_row(draw, letters) for _ in range(prompts + 256)]
    write_lines(directory / "eval.jsonl", rows[:256])
    write_lines(directory / "train.jsonl", rows[256:])
    write_model(directory / "model", alphabet=ALPHABET, seed=seed)
    return write_config(directory, _config(directory, seed=seed, asked=letters))


def _row(draw: random.Random, count: int) -> dict[str, str]:
    letters = "".join(draw.sample(LETTERS, count))
    return {"prompt": f"{letters}>", "letters": letters, "answer": "".join(draw.choices(DIGITS, k=len(letters)))}


def _config(directory: Path, *, seed: int, asked: int) -> dict[str, object]:
    return {
        "dir": str(directory / "run"),
        "seed": seed,
        "goals": {"reward/mean": 0.85, "eval/exact": 0.8},
        "model": {"path": str(directory / "model")},
        "data": {
            "train": str(directory / "train.jsonl"),
            "eval": str(directory / "eval.jsonl"),
            "max_prompt_tokens": asked + 2,
        },
        "rollout": {
            "n": 16,
            "max_new_tokens": asked + 1,
            "max_running": 256,
            "workflow": "hwrl_workflows:environment",
            "workflow_options": {"make": f"{Path(__file__).absolute()}:Lookup", "max_turns": asked + 2},
            "max_model_len": 24,
        },
        "train": {"steps": 500, "batch_groups": 16},
        "optimizer": {"learning_rate": 7e-4, "warmup_steps": 10, "min_learning_rate_ratio": 0.05},
        "async_training": {"staleness_threshold": 1},
        "checkpoint": {"save_every_steps": 100},
        "eval": {"every_steps": 100, "prompts": 256},
    }


def main() -> None:
    """Write the demo and print the path of its configuration."""
    parser = argparse.ArgumentParser(description=write_lookup.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--letters", type=int, default=1, help="letters of a prompt; with more, learning takes longer")
    args = parser.parse_args()
    print(write_lookup(args.directory, seed=args.seed, letters=args.letters))


if __name__ == "__main__":
    main()
