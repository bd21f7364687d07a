"""Every value of a configuration has bounds, and its file has limits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwrl.errors import ConfigError
from hwrl.run.config import Config, dump_config, dump_run_config, load_config, parse_config
from tests.support.run_config import MINIMAL, load, write_config

NAN, INFINITE = float("nan"), float("inf")

MAY_BE_ZERO = {
    "report.trace_every",
    "seed",
    "goals",
    "model.lora_rank",
    "rollout.max_restarts",
    "train.max_restarts",
    "optimizer.warmup_steps",
    "optimizer.min_learning_rate_ratio",
    "optimizer.betas",
    "optimizer.weight_decay",
    "async_training.staleness_threshold",
    "async_training.lead_versions",
    "checkpoint.save_every_steps",
    "eval.every_steps",
    "eval.temperature",
    "eval.pass_reward",
    "rollout.min_p",
    "report.samples_per_step",
    "algorithm.kl_coeff",
    "algorithm.entropy_coeff",
    "algorithm.overlong_buffer_tokens",
    "algorithm.overlong_penalty",
    "critic.kl_coeff",
    "critic.lam",
    "critic.warmup_steps",
    "optimizer.max_skipped_in_a_row",
    "eval.share",
}
MAY_BE_NEGATIVE = {"goals", "eval.pass_reward", "rollout.top_k"}
MAY_BE_EMPTY = {"rollout.stop", "rollout.stop_token_ids", "report.trackers"}


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key with a value, like ``train.steps``, and its JSON schema."""
    schema = Config.model_json_schema()
    for name, field in schema["properties"].items():
        section = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2])
        if section is None:
            yield name, field
        else:
            yield from ((f"{name}.{key}", inner) for key, inner in section["properties"].items())


def bad_values(key: str, schema: dict[str, Any]) -> list[object]:
    """Return bad values for a key of this kind. Raises KeyError for an unknown kind."""
    if "anyOf" in schema or "oneOf" in schema:
        kinds = schema.get("anyOf") or schema["oneOf"]
        return [bad for kind in kinds if kind != {"type": "null"} for bad in bad_values(key, kind)]
    if "enum" in schema or "const" in schema:
        return ["", "nonsense", NAN, -1, [], {}]
    numbers = [NAN, INFINITE, -INFINITE, 1e300, -1e300, True, "", "x", [], {}]
    numbers += [] if key in MAY_BE_ZERO else [0]
    numbers += [] if key in MAY_BE_NEGATIVE else [-1]
    match schema["type"]:
        case "object" if schema["additionalProperties"].get("type") == "number":
            return [5, [5], {"": 1.0}, {3: 1.0}, *({"x": number} for number in numbers)]
        case "array" if schema.get("prefixItems", [{}])[0].get("type") == "number":
            return [5, [], [0.5], [0.5, 0.5, 0.5], *([0.5, number] for number in numbers)]
        case "array" if schema.get("items", {}).get("type") == "integer":
            return [5, {}, [1.5], [-1], [10**30], [NAN], [True], [""], ["x"], [[]], [{}]]
        case kind:
            return {
                "integer": [*numbers, 1.5, 10**30],
                "number": [*numbers, 1e-300 if key.endswith("_s") else NAN],
                "boolean": ["maybe", 2, NAN, [], {}],
                "string": ["", 5, NAN, {}] if schema.get("format") != "path" else ["", 5, "a\0b", [], {}],
                "array": [*([] if key in MAY_BE_EMPTY else [[]]), [""], [5], 5, {}],
                "object": [5, [5], {"x": NAN}, {"x": {"y": [INFINITE]}}, {3: 1}, {"x": {1, 2}}],
            }[kind]


def with_value(key: str, value: object) -> dict[str, Any]:
    section, _, inner = key.rpartition(".")
    if not section:
        return {**MINIMAL, key: value}
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), inner: value}}


@pytest.mark.parametrize(("key", "schema"), [pytest.param(*field, id=field[0]) for field in fields()])
def test_every_key_refuses_what_it_cannot_mean(key: str, schema: dict[str, Any]) -> None:
    for bad in bad_values(key, schema):
        try:
            parse_config(with_value(key, bad))
        except ConfigError as exc:
            assert exc.why.startswith(key), f"{bad!r} is refused without the key: {exc.why}"
        else:
            pytest.fail(f"{key} takes {bad!r}: use a type of config/values.py, or add its kind to bad_values")


@pytest.mark.parametrize(
    "word",
    [
        "goals={reward/mean: .nan}",
        "rollout.temperature=.inf",
        "optimizer.betas=[0.9, 1.0]",
        "reward.workers=100000",
        "weights.timeout_s=1e-9",
        "model.target_modules='['",
    ],
)
def test_bad_values_are_refused_in_words_too(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"has 1 mistake\n  why: {word.partition('=')[0]}"):
        load(tmp_path, word)


_NESTED = "".join(f"- &a{i} {'[' * 150}{f'*a{i - 1}' if i else 0}{']' * 150}\n" for i in range(11))
_DOUBLING = "a0: &a0 {k: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmodel: {}\nseed: 2\n", r"the key 'seed' occurs twice\n(.|\n)*line 3"),
        ("model:\n  path: a\n  'path': b\n", r"'path' occurs twice(.|\n)*line 3"),
        ("[" * 100_000, "nested too deeply"),
        ("x: &x [" + "1," * 99 + "]\ny: &y [" + "*x," * 99 + "]\nz: [" + "*y," * 99 + "]\n", "more than 10,000 values"),
        ("&a [*a]", "more than 10,000 values"),
        (
            "x:\n" + "".join(f"- &a{i} {'[' * 150}*a{i - 1}{']' * 150}\n" for i in range(1, 12)).replace("*a0", "0"),
            "too deep",
        ),
        (_DOUBLING, "too many keys are merged"),
        ("seed: 2020-13-45", "month must be in 1..12"),
        ("seed: " + "9" * 5000, "cannot be read"),
        ("seed: !!bool x", "cannot be read"),
        ("seed: !!python/object:os.system x", "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "a single document"),
    ],
)
def test_a_file_that_says_no_one_thing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path} is not usable YAML(.|\n)*{message}"):
        load_config(path)


NUMBERS = {"1e-3": 1e-3, "1e5": 1e5, "1E+5": 1e5, "-2.5e3": -2500.0, ".5e-1": 0.05, "-.5": -0.5, "1_0e1": 100.0}
SAME_AS_EVER = {"7": 7, "-7": -7, "0": 0, "1_000": 1000, "0x10": 16, "0.5": 0.5, "00.5": 0.5, "1.0e-3": 1e-3}
TEXTS = ["12e4567", "lr-1e-6", "1e", "e5", "1e5x", "0o10", "1:30", "10:30:00", "v010", ".", "1.2.3"]


@pytest.mark.parametrize(
    ("text", "value"), [*NUMBERS.items(), *SAME_AS_EVER.items(), *((text, text) for text in TEXTS)]
)
def test_floats_are_those_of_yaml_1_2_and_read_back_the_same(tmp_path: Path, text: str, value: object) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + f"rollout: {{workflow: 'a:b', workflow_options: {{plain: {text}}}}}\n")
    config = load_config(path, [f"rollout.workflow_options.word={text}", f"rollout.workflow_options.text='{text}'"])
    assert repr(config.rollout.workflow_options) == repr({"plain": value, "word": value, "text": text})
    for content in (dump_config(config), dump_run_config(config).decode()):
        path.write_text(content if "\ndir:" in f"\n{content}" else f"{content}dir: {config.dir}\n")
        assert repr(load_config(path).rollout.workflow_options) == repr(config.rollout.workflow_options)


@pytest.mark.parametrize("text", ["0100", "-010", "+07", "089", "00", "0_7"])
def test_an_integer_with_a_leading_zero_is_refused(tmp_path: Path, text: str) -> None:
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match=rf"'train\.steps={re.escape(text)}' cannot be read(.|\n)*leading zero"):
        load_config(path, [f"train.steps={text}"])
    path.write_text(yaml.safe_dump(MINIMAL) + f"train:\n  steps: {text}\n")
    with pytest.raises(ConfigError, match=rf"'{re.escape(text)}' has a leading zero(.|\n)*line \d"):
        load_config(path)
    path.write_text(yaml.safe_dump(MINIMAL) + f"report: {{run_name: '{text}'}}\n")
    assert load_config(path).report.run_name == text


def test_a_key_may_be_changed_where_it_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + "train: &t {threads: 2, steps: 3}\nrollout: {<<: *t, threads: 4}\n")
    with pytest.raises(ConfigError, match=r"has 1 mistake\n  why: rollout\.steps"):
        load_config(path)
    path.write_text(yaml.safe_dump(MINIMAL) + "train: &t {threads: 2}\nrollout: {<<: *t, threads: 4}\n")
    assert load_config(path).rollout.threads == 4


def test_an_override_changes_no_other_section_of_the_same_alias(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    options = "workflow_options: &o {level: 1, inner: [{a: 1}]}, engine_options: *o"
    path.write_text(yaml.safe_dump(MINIMAL) + f"rollout: {{workflow: 'a:b', engine: e, {options}}}\n")
    rollout = load_config(path, ["rollout.workflow_options.level=7"]).rollout
    assert rollout.workflow_options == {"level": 7, "inner": [{"a": 1}]}
    assert rollout.engine_options == {"level": 1, "inner": [{"a": 1}]}
    word = "rollout={workflow: 'a:b', workflow_options: &o {level: 1}, engine: e, engine_options: *o}"
    rollout = load_config(path, [word, "rollout.engine_options.level=7"]).rollout
    assert (rollout.workflow_options, rollout.engine_options) == ({"level": 1}, {"level": 7})


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("confg.yaml", "did you mean {}/config.yaml?"),
        ("", "did you mean {}/config.yaml?"),
        ("a=b", "name the YAML file first"),
        ("other/file.yaml", "name a YAML file"),
        ("a.yaml", "name a YAML file"),  # a pipe
    ],
)
def test_a_path_without_a_configuration_is_told_with_the_likely_one(tmp_path: Path, given: str, advice: str) -> None:
    write_config(tmp_path)
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(ConfigError) as told:
        load_config(tmp_path / given)
    assert told.value.fix == advice.format(tmp_path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fifo, "not a regular file"),
        (huge, "more than 1,048,576 bytes"),
        (device, "not a regular file"),
        (Path.mkdir, ""),
    ],
)
def test_what_is_no_small_file_is_refused_at_once(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "config.yaml"
    make(path)
    with pytest.raises(ConfigError, match=f"cannot read {path}\n  why: .*{message}"):
        load_config(path)
