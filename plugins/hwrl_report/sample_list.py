"""Show the samples of a run as HTML: one article per sample, with all text escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwrl.run import read_lines
from hwrl_report.markup import element, escaped, number

MAX_SAMPLES = 300
MAX_CHARS = 3000
MAX_SEGMENTS = 40


def render_samples(path: Path) -> str:
    """Return the content of the section: a form to filter the samples, and the samples, newest first."""
    samples, total = choose_samples(path)
    if not samples:
        return element("p", "The run has written no samples (<code>report.samples_per_step</code>).", class_="note")
    shown = f"{len(samples):,} of {total:,} samples" + (", evenly spread" if len(samples) < total else "")
    count = element("p", f"{shown}. " + element("b", "", id="sample-matches"), class_="note")
    return _form(samples) + count + "".join(map(_article, samples))


def choose_samples(path: Path, *, maximum: int = MAX_SAMPLES) -> tuple[list[dict[str, Any]], int]:
    """Return up to ``maximum`` samples, spread evenly over the file, newest first, and the total number of samples."""
    ends = [end for end, sample in read_lines(path) if sample is not None]
    count = min(maximum, len(ends))
    chosen = {ends[len(ends) - 1 - index * len(ends) // count] for index in range(count)}
    chosen_samples = (
        [sample for end, sample in read_lines(path) if end in chosen and sample is not None] if chosen else []
    )
    return chosen_samples[::-1], len(ends)


def _form(samples: list[dict[str, Any]]) -> str:
    steps = [sample["step"] for sample in samples]

    def field(name: str, label: str, kind: str = "number", **attributes: object) -> str:
        return element("label", f"{label} " + f'<input type="{kind}" name="{name}"{_words(attributes)}>')

    fields = [
        field("step-from", "step from", min=min(steps), max=max(steps), placeholder=min(steps)),
        field("step-to", "to", min=min(steps), max=max(steps), placeholder=max(steps)),
        field("reward-from", "reward from", step="any"),
        field("reward-to", "to", step="any"),
        field("text", "text", "search", placeholder="any part of it"),
        field("truncated", "only truncated", "checkbox"),
    ]
    return element("form", "".join(fields), id="sample-filter")


def _words(attributes: dict[str, object]) -> str:
    return "".join(f' {name}="{escaped(value)}"' for name, value in attributes.items())


def _article(sample: dict[str, Any]) -> str:
    reward = sample.get("reward")
    facts = [
        element("b", f"step {escaped(sample['step'])}"),
        f"prompt {escaped(sample.get('sequence_number', '–'))}, sample {escaped(sample.get('sample', '–'))}",
        element("span", f"reward {_number(reward)}", class_="reward"),
        f"its prompt's mean {_number(sample.get('prompt_reward_mean'))}",
        _age(sample.get("age_min"), sample.get("age_max")),
    ]
    truncated = bool(sample.get("truncated"))
    if truncated:
        facts.append(element("span", "truncated", class_="warn"))
    parts = [_text("prompt", sample.get("prompt"), sample.get("prompt_tokens"), reward=None)]
    segments = sample.get("segments") if isinstance(sample.get("segments"), list) else []
    known = [segment for segment in segments or [] if isinstance(segment, dict)]
    for segment in known[:MAX_SEGMENTS]:
        parts.append(_text(segment.get("author"), segment.get("text"), segment.get("tokens"), segment.get("reward")))
    if len(known) > MAX_SEGMENTS:
        parts.append(element("p", f"… and {len(known) - MAX_SEGMENTS} further segments", class_="note"))
    return element(
        "article",
        element("header", " · ".join(facts)) + "".join(parts),
        data_step=sample["step"],
        data_reward=reward if isinstance(reward, int | float) else "",
        data_truncated=int(truncated),
    )


def _age(lowest: Any, highest: Any) -> str:
    return f"age {_number(lowest)}" if lowest == highest else f"age {_number(lowest)} to {_number(highest)}"


def _text(author: Any, text: Any, tokens: Any, reward: Any) -> str:
    kind = author if author in ("prompt", "policy") else "other"
    turn = "" if reward is None else f", reward {_number(reward)}"
    label = element("small", f"{escaped(author)}, {escaped(tokens)} tokens{turn}")
    return element(
        "div", label + element("pre", escaped(_cut(text) if isinstance(text, str) else text)), class_=f"segment {kind}"
    )


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[… {len(text) - MAX_CHARS:,} characters are only in samples.jsonl …]\n{text[-half:]}"


def _number(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else "–"
