"""Data sets beyond one file: directories and names of the library datasets, mixtures, curricula."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hwrl.errors import DataError
from hwrl.rollout import Curriculum, DataKeys, Prompt, PromptSet, PromptStream, check_prompts, digest_rows, mixture
from hwrl.rollout.data import Messages, Prompts
from tests.support.sources import REPO

ROWS = [{"question": f"{number}+1", "answer": str(number + 1), "level": number} for number in range(5)]
KEYS = DataKeys(prompt="question")


def encode(prompt: str | Messages) -> tuple[str, list[int]]:
    assert isinstance(prompt, str)
    return prompt, [ord(letter) for letter in prompt]


def read(path: Path) -> list[tuple[str, str, int]]:
    prompts = Prompts(path, encode=encode, max_prompt_tokens=9, keys=KEYS, source="sums")
    assert {prompt.source for prompt in prompts} == {"sums"}
    return [(prompt.text, prompt.answer, prompt.row["level"]) for prompt in prompts]


def save(directory: Path, rows: list[dict[str, object]], *, shards: int = 1) -> Path:
    """Write what ``Dataset.save_to_disk`` writes."""
    directory.mkdir(parents=True)
    names = [f"data-{index:05}-of-{shards:05}.arrow" for index in range(shards)]
    for index, name in enumerate(names):
        table = pa.Table.from_pylist(rows[index::shards])
        with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return directory


EXPECTED = [(row["question"], row["answer"], row["level"]) for row in ROWS]


# -- directories ----------------------------------------------------------------------------------------------------


def test_a_directory_is_read_shard_after_shard_with_other_columns_as_prompt(tmp_path: Path) -> None:
    assert sorted(read(save(tmp_path / "set", list(ROWS), shards=2))) == EXPECTED


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_directory_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.shuffle(seed=1).select(range(4)).save_to_disk(str(tmp_path / "some"), num_shards=2)
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "splits"))
    again = [tuple(row.values()) for row in datasets.load_from_disk(str(tmp_path / "some"))]
    assert read(tmp_path / "some") == again
    assert read(tmp_path / "splits" / "train") == EXPECTED
    with pytest.raises(DataError, match=r"several splits(.|\n)*splits/test, .*splits/train"):
        read(tmp_path / "splits")


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_name_is_loaded_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with files has the place of a name: the network may be absent."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "set" / "train.parquet")
    name = Path(f"hf:{tmp_path / 'set'}?split=train")
    assert read(name) == EXPECTED
    before = digest_rows(name)
    assert before == digest_rows(name)
    with pytest.raises(DataError, match="cannot be loaded"):
        read(Path(f"hf:{tmp_path / 'set'}?split=none"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:openai/gsm8k", "needs a name and a split"),
        ("hf:?split=train", "needs a name and a split"),
        ("hf:a/b?split=train&subset=c", "unknown option subset"),
        ("openai/gsm8k", r"hf:NAME\?split=SPLIT"),
    ],
)
def test_a_name_without_its_parts_is_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_prompts(Path(name), key="data.train")


def test_without_the_library_a_name_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"hwrl\[datasets\]"):
        check_prompts(Path("hf:openai/gsm8k?split=train"), key="data.train")


def test_what_is_wrong_with_a_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no state\.json"):
        read(tmp_path)
    saved = save(tmp_path / "set", list(ROWS))
    (saved / "data-00000-of-00001.arrow").write_bytes(b"broken")
    with pytest.raises(DataError, match="cannot be read"):
        read(saved)
    with pytest.raises(DataError, match=r"row 1 is not a prompt(.|\n)*needs a 'prompt'(.|\n)*data.prompt_key"):
        check_prompts(save(tmp_path / "other", list(ROWS)), key="data.train")


def test_a_directory_is_identified_by_the_names_and_contents_of_its_files(tmp_path: Path) -> None:
    saved, copy = (save(tmp_path / name, list(ROWS)) for name in ("set", "copy"))
    assert digest_rows(saved) == digest_rows(copy)
    (copy / "state.json").rename(copy / "state2.json")
    assert digest_rows(saved) != digest_rows(copy)


def test_a_row_without_a_column_that_the_reward_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, {**ROWS[0], "level": 1}]))
    check_prompts(tmp_path / "a.jsonl", key="data.train", keys=KEYS, columns=["level", "source"])
    with pytest.raises(DataError, match=r"line 1 lacks: unit\n.*further columns are: level"):
        check_prompts(tmp_path / "a.jsonl", key="data.train", keys=KEYS, columns=["level", "unit"])


# -- mixtures -------------------------------------------------------------------------------------------------------


def set_of(name: str, size: int, *, weight: float = 1.0) -> PromptSet:
    ids = np.ones(1, dtype=np.int32)
    rows = [{"difficulty": (index * 7) % size} for index in range(size)]
    return PromptSet(name, [Prompt(f"{name}{index}", ids, None, row=rows[index]) for index in range(size)], weight)


def test_a_mixture_has_exact_shares_in_each_block_and_every_prompt_once_an_epoch() -> None:
    sets = [set_of("a", 6, weight=0.6), set_of("b", 7, weight=0.3), set_of("c", 2, weight=0.1)]
    stream = PromptStream(sets, seed=1)
    texts = [stream[number].text for number in range(140)]
    for begin in range(0, 140, 10):
        assert Counter(text[0] for text in texts[begin : begin + 10]) == {"a": 6, "b": 3, "c": 1}
    assert texts[:10] != texts[10:20] and [text[0] for text in texts[:10]] != [text[0] for text in texts[10:20]]
    for one in sets:
        own = [text for text in texts if text[0] == one.name]
        size = len(one.prompts)
        assert all(len(set(own[begin : begin + size])) == size for begin in range(0, len(own) - size + 1, size))


def test_sets_of_one_size_have_orders_of_their_own() -> None:
    order = mixture([set_of("a", 20), set_of("b", 20)], 1)
    draws = [order(number) for number in range(40)]
    first, second = ([row for index, row in draws if index == one] for one in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_a_mixture_is_the_same_in_every_process_and_from_any_number_on() -> None:
    code = (
        "from tests.rollout.test_data_sets import set_of\n"
        "from hwrl.rollout import mixture\n"
        "order = mixture([set_of('a', 6, weight=2), set_of('b', 7)], 5)\n"
        "print([order(number) for number in (1000, 3, 7, 1001, 0, 12345678)])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout
    sets = [set_of("a", 6, weight=2), set_of("b", 7)]
    order = mixture(sets, 5)
    forwards = {number: order(number) for number in (0, 3, 7, 1000, 1001, 12345678)}
    assert eval(shown) == [forwards[number] for number in (1000, 3, 7, 1001, 0, 12345678)]
    assert [mixture(sets, 6)(number) for number in range(20)] != [order(number) for number in range(20)]


def test_weights_that_need_too_large_blocks_are_refused() -> None:
    with pytest.raises(DataError, match="too exact"):
        mixture([set_of("a", 2, weight=0.123456789), set_of("b", 2)], 1)


def test_a_single_set_has_the_order_of_runs_before_mixtures() -> None:
    order = mixture([set_of("", 5)], 3)
    expected = [int(row) for epoch in range(2) for row in np.random.default_rng([3, epoch]).permutation(5)]
    assert [order(number) for number in range(10)] == [(0, row) for row in expected]


# -- curricula ------------------------------------------------------------------------------------------------------


def documented_curriculum() -> Curriculum:
    (code,) = re.findall(r"^```python\n(.*?)^```", (REPO / "docs/data.md").read_text(), re.MULTILINE | re.DOTALL)
    assert code.count("\n") <= 30
    scope: dict[str, Curriculum] = {}
    exec(code, scope)
    return scope["easy_first"]


def test_the_curriculum_of_the_docs_begins_with_what_is_easy() -> None:
    stream = PromptStream([set_of("a", 10), set_of("b", 3)], seed=1, curriculum=documented_curriculum())
    assert [stream[number].row["difficulty"] for number in range(10)] == list(range(10))
    assert {stream[number].text[0] for number in range(10, 20)} == {"a", "b"}


def test_a_curriculum_that_is_not_pure_is_refused() -> None:
    calls = iter(range(10_000))
    with pytest.raises(DataError, match="not a pure function"):
        PromptStream([set_of("a", 5)], seed=1, curriculum=lambda sets, seed: lambda number: (0, next(calls) % 5))


def test_a_curriculum_that_ends_too_early_is_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"no prompt for sequence number (10|255)"):
        PromptStream([set_of("a", 10)], seed=1, curriculum=lambda sets, seed: lambda number: (0, range(10)[number]))


@pytest.mark.parametrize("answer", [(1, 0), (0, 5), (0, -1), 3, None])
def test_a_prompt_that_does_not_exist_is_refused(answer: object) -> None:
    stream = PromptStream([set_of("a", 5)], seed=1, curriculum=lambda sets, seed: lambda number: answer)  # type: ignore[arg-type, return-value] # the wrong type is the point
    with pytest.raises(DataError, match="no prompt for sequence number 7"):
        stream[7]
