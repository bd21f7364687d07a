"""``hwrl verifiers-rows``: write a taskset as prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hwrl_verifiers.tasks import load_env, load_tasks

HELP = "write the tasks of a verifiers taskset as prompts (JSON lines), for data.train and data.eval"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("taskset", help='the taskset\'s id, or its settings as JSON: {"id": "gsm8k", "split": "test"}')
    parser.add_argument("output", type=Path, help="the file to write, .jsonl")
    parser.add_argument("--limit", type=int, help="how many tasks; rollout.workflow_options.limit must be the same")


def run(args: argparse.Namespace) -> int:
    """Write a row for each task: its text, its key as the answer, and its index, ``task``."""
    chosen = json.loads(args.taskset) if args.taskset.startswith("{") else args.taskset
    tasks = load_tasks(load_env(chosen), limit=args.limit)
    with args.output.open("w", encoding="utf-8") as file:
        for number, task in tasks.items():
            text = task.data.prompt_text or task.data.name or f"task {number}"
            file.write(json.dumps({"prompt": text, "answer": task.key, "task": number}) + "\n")
    print(f"{args.output}: {len(tasks)} rows")
    return 0
