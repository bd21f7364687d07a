"""Sums and differences of a few numbers, the task ``chain_sum`` of reasoning-gym in its words: prompts and the reward.

``python chain_sum.py`` writes train.jsonl and eval.jsonl, which share no question; ``--help`` has other sums.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

ASK = "State the final answer to the following arithmetic problem: "
EXAMPLES = ("5 + 8 - 2", "9 - 6 + 4 + 7")
"""Two turns before the question: a small model follows examples better than words."""
FORM = "\nThe last line of your answer is: Answer: NUMBER"
_ANSWER = re.compile(r"Answer:\s*\**\s*([-+]?\d[\d,]*)")


def score(prompt: str, response: str, answer: str) -> dict[str, float]:
    r"""Return the reward: 0.9 for the right number, and 0.1 for one answer, in the last line.

    >>> score("", "Start with 2. Then + 3 gives 5.\nAnswer: 5<|im_end|>", "5")
    {'reward': 1.0, 'exact': 1.0, 'form': 1.0}
    """
    text = response.replace("<|im_end|>", "").strip()
    found = _ANSWER.findall(text)
    exact = float(bool(found) and found[-1].replace(",", "").removeprefix("+") == answer)
    form = float(len(found) == 1 and bool(_ANSWER.search(text.rpartition("\n")[2])))
    return {"reward": 0.9 * exact + 0.1 * form, "exact": exact, "form": form}


def solution(problem: str) -> str:
    r"""Return the answer with its steps.

    >>> solution("5 + 8 - 2")
    'Start with 5. Then + 8 gives 13. Then - 2 gives 11.\nAnswer: 11'
    """
    first, *rest = problem.split()
    total, steps = int(first), [f"Start with {first}."]
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total += int(sign + number)
        steps.append(f"Then {sign} {number} gives {total}.")
    return f"{' '.join(steps)}\nAnswer: {total}"


def conversation(problem: str, *, examples: bool = True) -> list[dict[str, str]]:
    """Return the turns up to the question."""
    turns = []
    for one in EXAMPLES if examples else ():
        turns += [{"role": "user", "content": f"{ASK}{one} ="}, {"role": "assistant", "content": solution(one)}]
    return [*turns, {"role": "user", "content": f"{ASK}{problem} ={'' if examples else FORM}"}]


def problems(draw: random.Random, *, count: int, terms: int, digits: int, without: set[str]) -> list[str]:
    """Return ``count`` problems of 2 to ``terms`` numbers with ``digits`` digits, none of ``without``."""
    numbers = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    found: list[str] = []
    while len(found) < count:
        first, *others = draw.choices(numbers, k=draw.randint(2, terms))
        problem = " ".join([str(first), *(f"{draw.choice('+-')} {number}" for number in others)])
        if problem not in without:
            found.append(problem)
    return found


def main() -> None:
    """Write prompts into the working directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--terms", type=int, default=3, help="at most so many numbers in a sum (3)")
    parser.add_argument("--digits", type=int, default=1, help="of each number (1)")
    parser.add_argument("--plain", action="store_true", help="the form of the answer in words, without examples")
    parser.add_argument("--prefix", default="", help="of the files' names")
    args = parser.parse_args()
    draw, held_out = random.Random(1), set[str]()
    for name, count in (("eval", 256), ("train", 4096)):
        found = problems(draw, count=count, terms=args.terms, digits=args.digits, without=held_out)
        held_out = held_out or set(found)
        path = Path(f"{args.prefix}{name}.jsonl")
        with path.open("w", encoding="utf-8") as file:
            for one in found:
                row = {"prompt": conversation(one, examples=not args.plain), "answer": solution(one).rpartition(" ")[2]}
                print(json.dumps(row), file=file)
        print(f"{path}: {count} prompts")


if __name__ == "__main__":
    main()
