"""The configuration: typed, complete, and clear about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic.fields import FieldInfo

from hwrl.errors import ConfigError
from hwrl.run.config import Config, Section, dump_config, load_config

MINIMAL = {"dir": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}, "reward": {"function": "m:f"}}


def write(tmp_path: Path, tree: object) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_overrides_are_applied_in_order_and_typed(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL), ["train.steps=5", "train.steps=7", "resume=true", "optimizer.learning_rate=1e-3"]
    )
    assert (config.train.steps, config.resume, config.optimizer.learning_rate) == (7, True, 1e-3)


def test_what_is_printed_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["goals={eval/exact: 0.5}"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_an_unknown_key_is_an_error_with_the_likely_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean async_training\.staleness_threshold\?"):
        load_config(write(tmp_path, MINIMAL), ["async_training.stalenes_threshold=2"])
    with pytest.raises(ConfigError, match=r"did you mean async_training\.partial_rollout\?"):
        load_config(write(tmp_path, MINIMAL), ["train.partial_rollout=true"])


def test_every_mistake_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 2 mistakes(.|\n)*model\.path(.|\n)*train\.steps"):
        load_config(write(tmp_path, {**MINIMAL, "model": {}}), ["train.steps=0"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.steps", "not an override"),
        ("=3", "not an override"),
        ("dir.sub=3", "does not fit"),
        ("dir=[", "cannot be read"),
    ],
)
def test_a_word_that_is_no_override_is_refused(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, MINIMAL), [word])


@pytest.mark.parametrize("content", ["a: [", "- 1\n", "just text"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml")


def test_settings_that_cannot_work_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_running=4 must be at least n=8"):
        load_config(write(tmp_path, MINIMAL), ["rollout.max_running=4"])
    with pytest.raises(ConfigError, match=r"batch_groups=1 must be at least train\.ranks=2"):
        load_config(write(tmp_path, MINIMAL), ["train.batch_groups=1", "train.ranks=2"])


def row_of(name: str, field: FieldInfo) -> str:
    """Return the line of docs/configuration.md that describes a key."""
    default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
    return f"| `{name}` | {default} | {(field.description or '').replace('``', '`')} |"


def test_every_key_is_documented_with_its_default() -> None:
    page = Path("docs/configuration.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0].strip("`"): part.splitlines() for part in page.split("\n## ")}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key, inner in field.annotation.model_fields.items():
                assert row_of(key, inner) in sections[name]
        else:
            assert row_of(name, field) in sections["Top level"]
