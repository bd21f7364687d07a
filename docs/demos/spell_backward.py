"""A demo with a task of reasoning-gym: spell a word backward, judged by that package's own code.

``pip install reasoning-gym``; then ``python docs/demos/spell_backward.py DIR`` writes all files for ``hwrl train
DIR/config.yaml``.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import reasoning_gym

from hwrl.run.demo import write_config, write_lines, write_model

TASK = "spell_backward"
PROMPT = "Spell this word backward (example: sun -> nus): "
LETTERS = "adeilmnoprst"
"""Only words of these letters are taken, so that a tiny model with random weights learns the task in minutes."""
_score_answer = reasoning_gym.get_score_answer_fn(TASK)


def score(prompt: str, response: str, answer: str, entry: dict[str, Any]) -> dict[str, float]:
    """Return reasoning-gym's score, and whether it is the full one. ``entry`` is a column of the row."""
    reward = float(_score_answer(response, entry))
    return {"reward": reward, "exact": float(reward == 1.0)}


def write_demo(directory: Path, *, seed: int, tasks: int = 40_000) -> Path:
    """Write data, model and configuration to ``directory``; return the configuration's path.

    One word in ten is for evaluation only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "eval": {}}
    for entry in reasoning_gym.create_dataset(TASK, size=tasks, seed=seed, min_word_len=3, max_word_len=3):
        word = entry["metadata"]["word"]
        if set(word) <= set(LETTERS):
            side = "eval" if zlib.crc32(word.encode()) % 10 == 0 else "train"
            rows[side][word] = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry}
    for side, found in rows.items():
        write_lines(directory / f"{side}.jsonl", list(found.values()))
    write_model(
        directory / "model", alphabet=["<pad>", "<eos>", "<bos>", PROMPT, *LETTERS, "<1>", "<2>", "<3>"], seed=seed
    )
    return write_config(directory, _config(directory, seed=seed))


def _config(directory: Path, *, seed: int) -> dict[str, object]:
    return {
        "dir": str(directory / "run"),
        "seed": seed,
        "goals": {"reward/mean": 0.75, "eval/reward": 0.75},
        "model": {"path": str(directory / "model")},
        "data": {
            "train": str(directory / "train.jsonl"),
            "eval": str(directory / "eval.jsonl"),
            "max_prompt_tokens": 6,
        },
        "reward": {"function": f"{Path(__file__).absolute()}:score"},
        "rollout": {"n": 16, "max_new_tokens": 4, "max_running": 512},
        "train": {"steps": 800, "batch_groups": 32},
        "optimizer": {"learning_rate": 7e-4, "warmup_steps": 10, "min_learning_rate_ratio": 0.05},
        "algorithm": {"entropy_coeff": 0.03},  # without it the policy soon repeats one letter
        "async_training": {"staleness_threshold": 1},
        "checkpoint": {"save_every_steps": 300},
        "eval": {"every_steps": 200, "prompts": 256},
    }


def main() -> None:
    """Write the demo and print the path of its configuration."""
    parser = argparse.ArgumentParser(description=write_demo.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(write_demo(args.directory, seed=args.seed))


if __name__ == "__main__":
    main()
