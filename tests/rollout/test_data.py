"""Prompts and reward functions that users give: read right, or refused with the row and the reason."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hwrl.errors import ConfigError, DataError
from hwrl.models import load_tokenizer, use_chat_template
from hwrl.rollout import ChatTokens, PromptSet, PromptStream
from hwrl.rollout.data import Messages, Prompt, Prompts
from hwrl.rollout.reward import load_reward, metrics_of
from hwrl.run.demo import write_demo


def encode(prompt: str | Messages) -> tuple[str, list[int]]:
    assert isinstance(prompt, str), "conversations are for real tokenizers"
    return prompt, [ord(letter) for letter in prompt]


def read(path: Path, *, longest: int = 10) -> list[Prompt]:
    return list(Prompts(path, encode=encode, max_prompt_tokens=longest))


def test_json_lines_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1", "answer": "2", "extra": 0, "max_new_tokens": 7},
        {"prompt": "ü", "answer": "x", "extra": 1, "max_new_tokens": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        prompts = read(tmp_path / name)
        assert [(one.text, one.token_ids.tolist(), one.answer, one.max_new_tokens) for one in prompts] == [
            ("1+1", [49, 43, 49], "2", 7),
            ("ü", [252], "x", None),
        ]
        assert [one.row for one in prompts] == [{"extra": 0}, {"extra": 1}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "\n", "holds no prompts"),
        ("a.jsonl", '{"prompt": "x", "answer": 1}\n{broken\n', "line 2 is not JSON(.|\n)*double quotes, column 2"),
        ("a.jsonl", '{"prompt": "\udcfc", "answer": 1}\n', "line 1 is not JSON(.|\n)*codec can't decode"),
        ("a.jsonl", '\n{"prompt": "x"}\n', "line 2 is not a prompt"),
        ("a.jsonl", '["x"]\n', "line 1 is not a prompt"),
        ("a.jsonl", '{"prompt": [], "answer": 1}\n', "line 1 is not a prompt"),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user"}], "answer": 1}\n',
            "line 1 is not a prompt(.|\n)*'role' and 'content'",
        ),
        ("a.jsonl", '{"prompt": "", "answer": 1}\n', "line 1 has a prompt of 0 tokens"),
        ("a.jsonl", '{"prompt": "1", "answer": 1, "answer": 2}\n', "line 1 is not JSON(.|\n)*appears twice"),
        ("a.jsonl", '{"prompt": "12345678901", "answer": 1}\n', "prompt of 11 tokens"),
        ("a.jsonl", '{"prompt": "x", "answer": 1, "max_new_tokens": "9"}\n', "line 1 has no usable max_new_tokens"),
        ("a.csv", "prompt,answer\n", "unknown kind"),
        ("a.parquet", "not parquet", "cannot be read as Parquet"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_values_that_python_cannot_hold_and_damaged_tables_are_refused_in_words(tmp_path: Path) -> None:
    wrong = pa.py_buffer(b"\xff\xfe")
    ends = pa.py_buffer(np.array([0, 1, 2], np.int32).tobytes())
    columns = {
        "far": pa.array([2**50, 0], pa.timestamp("ms")),
        "exact": pa.array([1, 2], pa.timestamp("ns")),
        "date": pa.array([2**30, 0], pa.date32()),
        "zone": pa.array([1, 2], pa.timestamp("us", "Nowhere/Here")),
        "text": pa.Array.from_buffers(pa.string(), 2, [None, ends, wrong]),
    }
    for name, column in columns.items():
        table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], name: column})
        file, saved = tmp_path / f"{name}.parquet", tmp_path / name
        pq.write_table(table, file)
        saved.mkdir()
        (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
        with pa.OSFile(str(saved / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        for path in (file, saved):
            try:
                assert len(read(path)) == 2  # with pandas, "exact" is read
            except DataError as error:
                assert error.why, name
    for state in ("[" * 100_000, '{"_data_files": [{"filename": "pipe"}]}'):
        (saved / "state.json").write_text(state)
        (saved / "pipe").unlink(missing_ok=True)
        os.mkfifo(saved / "pipe")
        with pytest.raises(DataError, match="text cannot be read"):
            read(saved)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(DataError, match="line 1 is too long"):
        read(path)


def test_a_row_of_parquet_is_told_by_its_number(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "1", "answer": "1"}, {"prompt": None}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2 is not a prompt"):
        read(tmp_path / "a.parquet")


TEMPLATE = """\
<bos>{% for message in messages %}\
{% if message.role not in ["system", "user"] %}{{ raise_exception("unknown role " + message.role) }}{% endif %}\
{{ message.content }}>{% endfor %}{% if add_generation_prompt %}1{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=1, prompts=16)
    return load_tokenizer(directory / "model")


def row_of(prompt: object) -> dict[str, object]:
    return {"prompt": prompt, "answer": "1"}


def encoded(path: Path, tokenizer: Any, *rows: dict[str, object]) -> list[tuple[str, list[str]]]:
    """Return each prompt's text and tokens, from a file of each kind."""
    path.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    files = [path.with_suffix(suffix) for suffix in (".jsonl", ".parquet")]
    encode = ChatTokens(tokenizer, end_ids=()).encode_prompt
    read = [Prompts(file, encode=encode, max_prompt_tokens=9) for file in files]
    one, other = [
        [(p.text, tokenizer.convert_ids_to_tokens(p.token_ids.tolist())) for p in prompts] for prompts in read
    ]
    assert one == other
    return one


def test_a_conversation_goes_through_the_chat_template_and_gets_its_special_tokens_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    talk = [{"role": "system", "content": "7"}, {"role": "user", "content": "21"}]
    assert encoded(tmp_path / "talk", tokenizer, row_of(talk)) == [
        ("<bos>7>21>1", ["<bos>", "7", ">", "2", "1", ">", "1"])
    ]


def test_a_text_is_encoded_as_it_is_with_the_tokenizers_special_tokens(tmp_path: Path, tokenizer: Any) -> None:
    assert encoded(tmp_path / "text", tokenizer, row_of("21>")) == [("21>", ["<bos>", "2", "1", ">"])]


def test_messages_are_refused_with_the_row_where_the_template_refuses_them_or_is_missing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row_of([{"role": role, "content": "1"}]) for role in ("user", "tool")]
    with pytest.raises(
        DataError, match=r"line 1 cannot be encoded(.|\n)*chat_template is not set(.|\n)*or write a string"
    ):
        encoded(tmp_path / "talk", tokenizer, *rows)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    with pytest.raises(DataError, match=r"line 2 cannot be encoded(.|\n)*unknown role tool"):
        encoded(tmp_path / "talk", tokenizer, *rows)


def test_a_token_that_the_model_does_not_know_is_told_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "2 $", "answer": 1}\n{"prompt": "2 €", "answer": 1}\n', encoding="utf-8")
    list(Prompts(path, encode=encode, max_prompt_tokens=9, vocabulary=0x20AD))
    with pytest.raises(DataError, match=r"line 2 has a token unknown to the model(.|\n)*8364(.|\n)*has 8364"):
        list(Prompts(path, encode=encode, max_prompt_tokens=9, vocabulary=0x20AC))


def test_a_prompt_is_encoded_at_its_first_use_and_once(tmp_path: Path) -> None:
    path, asked = tmp_path / "a.jsonl", list[str]()
    path.write_text("".join(f'{{"prompt": "{number}", "answer": 1}}\n' for number in range(5)))

    def noted(prompt: str | Messages) -> tuple[str, list[int]]:
        asked.append(str(prompt))
        return encode(prompt)

    prompts = Prompts(path, encode=noted, max_prompt_tokens=9)
    assert (len(prompts), asked) == (5, [])
    assert prompts[3].token_ids.tolist() == [51]
    assert [one.text for one in prompts[1:4]] == ["1", "2", "3"]
    assert asked == ["3", "1", "2"]
    with pytest.raises(IndexError):
        prompts[5]


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read(tmp_path / "none.jsonl")


def test_the_stream_shows_every_prompt_once_an_epoch_in_an_order_of_the_seed() -> None:
    prompts = [Prompt(str(index), np.array([index], dtype=np.int32), None) for index in range(7)]
    stream, again, other = (PromptStream([PromptSet("", prompts)], seed=seed) for seed in (1, 1, 2))
    first = [stream[number].text for number in range(7)]
    second = [stream[number].text for number in range(7, 14)]
    assert sorted(first) == sorted(second) == [str(index) for index in range(7)]
    assert first != second
    assert [again[number].text for number in (13, 0, 8)] == [second[6], first[0], second[1]]
    assert [other[number].text for number in range(7)] != first


def test_a_reward_comes_from_a_module_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def score(prompt, response, answer):\n    return len(response)\n")
    assert load_reward(f"{path}:score")("", "abc", None) == 3
    assert load_reward("hwrl.run.demo:sort_reward")("21>", "12", "12") == {"reward": 1.0, "exact": 1.0}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "reward.function=nothing names no function"),
        ("no.such.module:f", "cannot be imported"),
        ("no_such_file.py:f", "there is no file"),
        ("hwrl.run.demo:absent", "no function 'absent'(.|\n)*reward.function=hwrl"),
        ("hwrl.run.demo:sort_rewrad", "did you mean 'sort_reward'"),
        ("nothing", "for example reward.function=my_code"),
    ],
)
def test_a_reward_that_cannot_be_found_is_said(target: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_reward(target)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", r"raised: ZeroDivisionError\("),
        ("import sys; sys.exit(0)", r"it ended the process: SystemExit\(0\)\n  fix: .*__main__"),
        ("raise SystemExit('usage: …')", "it ended the process"),
    ],
)
def test_reward_code_that_fails_to_load_is_said(
    tmp_path: Path, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_reward", raising=False)
    (tmp_path / "broken_reward.py").write_text(f"{code}\n")
    for place in (f"{tmp_path / 'broken_reward.py'}", "broken_reward"):
        with pytest.raises(DataError, match=f"broken_reward(.py)? cannot be loaded\n  why: (.|\n)*{message}"):
            load_reward(f"{place}:f")


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "result",
    [
        "good",
        "1.0",
        NAN,
        -INFINITE,
        1e39,
        pytest.param(10**400, id="long"),
        1j,
        np.ones(2),
        {"score": 1.0},
        {"reward": 1.0, "exact": NAN},
        {"reward": 1.0, "length": INFINITE},
        {"reward": 1.0, "length": None},
    ],
)
def test_a_reward_must_be_a_finite_number(result: object) -> None:
    with pytest.raises(DataError, match="reward is not a"):
        metrics_of(result)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mean", "hwrl itself computes the metric reward/mean"),
        ("std", "hwrl itself computes the metric reward/std"),
        ("version", "hwrl itself computes the metric eval/version"),
        *(
            (name, "a name has up to 100 letters")
            for name in ("", " ", "a\nb", "a=b", "/a", "a" * 101, 7, None, ("a",), b"a")
        ),
    ],
)
def test_a_metric_needs_a_valid_name_that_is_not_hwrls(name: object, why: str) -> None:
    metrics = {"reward": 1.0, name: 2.0}
    with pytest.raises(DataError, match=f"named {re.escape(repr(name)[:50])}(.|\n)*{why}"):
        metrics_of(metrics)


def test_what_has_a_number_is_a_number() -> None:
    metrics = {"reward": np.float32(0.5), "length/tokens": 3, "größe": True, "loss": torch.tensor(0.25)}
    assert metrics_of(metrics) == {"reward": 0.5, "length/tokens": 3.0, "größe": 1.0, "loss": 0.25}


TOOLS_TEMPLATE = """\
<bos>{% if tools %}{{ tools | length }}{{ tools[0].name }}{% endif %}{{ messages[0].content }}\
{% if enable_thinking | default(true) %}>{% endif %}"""


def test_a_rows_tools_go_into_the_chat_template(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
    row = row_of([{"role": "user", "content": "7"}])
    tools = [{"name": "5"}, {"name": "6"}]
    assert [text for text, _ in encoded(tmp_path / "a", tokenizer, {**row, "tools": tools})] == ["<bos>257>"]
    assert [text for text, _ in encoded(tmp_path / "b", tokenizer, {**row, "tools": json.dumps(tools)})] == [
        "<bos>257>"
    ]
    assert [text for text, _ in encoded(tmp_path / "c", tokenizer, {**row, "tools": []}, row)] == ["<bos>7>"] * 2
    for wrong, fault in (("[{", "no JSON"), ([5], "a list of JSON schemas"), ({"name": "5"}, "a list of JSON schemas")):
        with pytest.raises(DataError, match=rf"line 1 cannot be encoded\n  why: its tools (.|\n)*{fault}"):
            encoded(tmp_path / "d", tokenizer, {**row, "tools": wrong})


def test_a_runs_chat_template_and_its_options_are_the_tokenizers(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.copy(tokenizer)
    use_chat_template(tokenizer, TOOLS_TEMPLATE, options={"enable_thinking": False})
    row = row_of([{"role": "user", "content": "7"}])
    assert [text for text, _ in encoded(tmp_path / "a", tokenizer, row)] == ["<bos>7"]
    assert tokenizer.apply_chat_template(row["prompt"], tokenize=False, enable_thinking=True) == "<bos>7>"
    for option, fault in (("enable_thinkin", "never uses it"), ("tools", "hwrl sets it"), ("tokenize", "hwrl sets it")):
        with pytest.raises(ConfigError, match=rf"chat_template_kwargs\.{option} cannot be set\n  why: .*{fault}"):
            use_chat_template(tokenizer, None, options={option: False})
    tokenizer.save_pretrained(tmp_path / "exported")
    exported = load_tokenizer(tmp_path / "exported")
    assert exported.apply_chat_template(row["prompt"], tokenize=False) == "<bos>7", "an export has the options, too"
