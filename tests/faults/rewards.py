"""Reward functions with gates, some of them faulty. A point copies this file beside its data.

Several workers may call them, so calls are counted in files.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from hwrl.run.demo import sort_reward
from tests.faults.phases import VARIABLE, pass_gate

Metrics = dict[str, float]
_EVALUATED_PROMPTS = 3


@cache
def _evaluation() -> set[str]:
    text = Path(os.environ[VARIABLE], "eval.jsonl").read_text()
    return {json.loads(line)["prompt"] for line in text.splitlines()}


def _count(what: str) -> int:
    """Return how many calls of this function with ``what`` there were in all processes of the run."""
    file = os.open(Path(os.environ[VARIABLE], f"count-{what}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


def plain(prompt: str, response: str, answer: str) -> Metrics:
    if prompt not in _evaluation():
        pass_gate("judging", count=_count("judged"))
    elif (count := _count("evaluated")) <= _EVALUATED_PROMPTS:
        pass_gate("evaluating", count=count)
    else:
        pass_gate("evaluating-finally", count=count - _EVALUATED_PROMPTS)
    return sort_reward(prompt, response, answer)


def _is_first(what: str) -> bool:
    """Return whether this is the first call with ``what`` in all processes of the run."""
    try:
        Path(os.environ[VARIABLE], f"first-{what}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _hang() -> None:
    time.sleep(1e6)


def hangs_once(prompt: str, response: str, answer: str) -> Metrics:
    if prompt not in _evaluation() and _count("called") > 5 and _is_first("hang"):
        _hang()
    return plain(prompt, response, answer)


def hangs_always(prompt: str, response: str, answer: str) -> Metrics:
    if _count("called") > 5:
        _hang()
    return plain(prompt, response, answer)


def hangs_on_evaluation(prompt: str, response: str, answer: str) -> Metrics:
    if prompt in _evaluation():
        _hang()
    return plain(prompt, response, answer)


def hangs_once_on_evaluation(prompt: str, response: str, answer: str) -> Metrics:
    if prompt in _evaluation() and _is_first("hang"):
        _hang()
    return plain(prompt, response, answer)


def raises_sometimes(prompt: str, response: str, answer: str) -> Metrics:
    if _count("called") % 5 == 0:
        raise ValueError("every fifth call fails")
    return plain(prompt, response, answer)


def raises_on_evaluation(prompt: str, response: str, answer: str) -> Metrics:
    if prompt in _evaluation():
        raise ValueError("no evaluation prompt is scored")
    return plain(prompt, response, answer)


def raises_after_160(prompt: str, response: str, answer: str) -> Metrics:
    """Raise from the 161st call on: forty steps of four responses each."""
    if _count("called") > 160:
        raise ValueError("no response is scored any longer")
    return plain(prompt, response, answer)


def loss_fails_once(inputs: Any) -> tuple[Any, dict[str, Any]]:
    """A policy gradient loss, whose fifth call or a later one raises once in a run and its continuation."""
    if _count("losses") > 4 and _is_first("loss"):
        raise ValueError("the loss of a test")
    return -inputs.advantages * inputs.logprobs, {}


def exits_sometimes(prompt: str, response: str, answer: str) -> Metrics:
    if _count("called") % 5 == 0:
        sys.exit(0)
    return plain(prompt, response, answer)


def interrupts_sometimes(prompt: str, response: str, answer: str) -> Metrics:
    if _count("called") % 5 == 0:
        raise KeyboardInterrupt
    return plain(prompt, response, answer)


def ends_its_process_once(prompt: str, response: str, answer: str) -> Metrics:
    if _count("called") > 5 and _is_first("end"):
        os._exit(0)
    return plain(prompt, response, answer)


def gives_nan_sometimes(prompt: str, response: str, answer: str) -> Metrics:
    if _count("called") % 5 == 0:
        return {"reward": float("nan")}
    return plain(prompt, response, answer)


def gives_nan_always(prompt: str, response: str, answer: str) -> Metrics:
    return {"reward": float("nan")}


def teaches_some(prompt: str, response: str, answer: str) -> Metrics:
    """Always raise for a seventh of the training prompts, and give equal rewards for two sevenths."""
    metrics = plain(prompt, response, answer)
    kind = zlib.crc32(prompt.encode()) % 7
    if prompt in _evaluation():
        return metrics
    if kind == 0:
        raise ValueError("nobody can judge this prompt")
    return {**metrics, "reward": 1.0 if kind < 3 else random.random()}


def is_slow(prompt: str, response: str, answer: str) -> Metrics:
    time.sleep(0.5)
    return plain(prompt, response, answer)
