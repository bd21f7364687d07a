"""The keys of data sets and evaluations in a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.errors import ConfigError
from hwrl.run.config import dump_config, load_config
from tests.support.run_config import load


def test_data_sets_are_a_path_a_list_or_names_with_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "data.train=[a.jsonl, {path: 'hf:x/y?split=train', weight: 2, prompt_key: question}]",
        "data.eval={sums: b.jsonl, words: {path: c.parquet}}",
    ]
    config = load(tmp_path, *words)
    assert [(str(one.path), one.name, one.weight) for one in config.data.train_sets] == [
        (str(tmp_path / "a.jsonl"), "a", 1.0),
        ("hf:x/y?split=train", "y", 2.0),
    ]
    assert [config.data.keys_of(one) for one in config.data.train_sets] == [
        ("prompt", "answer"),
        ("question", "answer"),
    ]
    assert [(one.path, one.name) for one in config.data.eval_sets] == [
        (tmp_path / "b.jsonl", "sums"),
        (tmp_path / "c.parquet", "words"),
    ]
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    (one,) = load(tmp_path, "data.train={path: a.jsonl, prompt_key: question}").data.train_sets
    assert (one.name, one.prompt_key) == ("a", "question")
    with pytest.raises(ConfigError, match=r"data\.eval: .*weights are only for data\.train"):
        load(tmp_path, "data.eval=[{path: a.jsonl, weight: 2}]")
