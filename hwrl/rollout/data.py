"""The user's prompts from JSON Lines or Parquet, tokenised once, in an order set by the seed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hwrl.errors import DataError
from hwrl.interfaces import Ints
from hwrl.rollout.reward import check_columns

Messages = list[dict[str, Any]]
"""A conversation. Each message has the strings ``role`` and ``content``, and any other keys for the chat template."""
Encode = Callable[..., tuple[str, Sequence[int]]]
"""Turns a prompt (a string or messages) into the model's input, as text and as token ids. It gets ``tools=``, the row's
column of this name, if the row has one."""

_OWN_COLUMNS = ("prompt", "answer", "max_new_tokens")


@dataclass(frozen=True)
class Prompt:
    """One row: the prompt as text and as token ids (int32), and the ``answer`` for the reward function.

    A conversation's ``text`` comes from the chat template. ``max_new_tokens`` limits the responses to this prompt.
    ``row`` has the row's other columns, by name. ``source`` names the data set; it is empty if there is only one.
    """

    text: str
    token_ids: Ints
    answer: Any
    max_new_tokens: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


class PromptStream:
    """An endless stream over the prompts: epoch after epoch, each in a new order drawn from ``seed``.

    The prompt with sequence number ``n`` is the same in every process and after every resume.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._epoch = -1
        self._order: Ints = np.empty(0, dtype=np.int32)

    def __getitem__(self, sequence_number: int) -> Prompt:
        epoch, index = divmod(sequence_number, len(self._prompts))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).astype(np.int32)
            self._epoch = epoch
        return self._prompts[int(self._order[index])]


def load_prompts(path: Path, *, encode: Encode, max_prompt_tokens: int, content: bytes | None = None) -> list[Prompt]:
    """Read every row of ``path`` (``.jsonl`` or ``.parquet``).

    A row has ``prompt`` (a string or messages) and ``answer`` (any value). It may have ``max_new_tokens``, to lower the
    run's limit on responses. Pass the file's bytes as ``content`` if they are read already. Raises the errors of
    :func:`check_prompts`. Raises DataError, with the row's place, if ``encode`` fails, and if a prompt is empty or
    longer than ``max_prompt_tokens``.
    """
    prompts = []
    for place, row in _rows(path, content=content):
        text, token_ids = _encoded(row, encode, place=place)
        if not 1 <= len(token_ids) <= max_prompt_tokens:
            raise DataError(
                f"{place} has a prompt of {len(token_ids)} tokens",
                why=f"1 to {max_prompt_tokens} are allowed (data.max_prompt_tokens)",
                fix="drop or shorten the row, or raise data.max_prompt_tokens",
            )
        prompts.append(Prompt(text, token_ids, row["answer"], row.get("max_new_tokens"), row=_other_columns(row)))
    return prompts


def _other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _OWN_COLUMNS}


def check_prompts(path: Path, *, key: str, columns: Collection[str] = ()) -> None:
    """Check the rows of ``path`` without a tokenizer. ``key`` is the configuration key with the path.

    Raises DataError if the file is missing, empty or of an unknown kind, and, with the row's place, if a row is not a
    prompt with an answer, or lacks one of ``columns``, which the reward function gets.
    """
    for place, row in _rows(path, key=key):
        check_columns(columns, _other_columns(row), place=place)


def _check_row(row: Any, *, place: str) -> None:
    if not isinstance(row, dict) or "answer" not in row or not _is_prompt(row.get("prompt")):
        raise DataError(
            f"{place} is not a prompt",
            why="it needs a 'prompt' (a string, or a list of messages with the strings 'role' and 'content') and an "
            f"'answer'; it is {str(row)[:80]!r}",
            fix='write rows like {"prompt": "2 + 2 =", "answer": "4"}, or '
            '{"prompt": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}',
        )
    limit = row.get("max_new_tokens")
    if limit is not None and (type(limit) is not int or limit <= 0):
        raise DataError(
            f"{place} has no usable max_new_tokens",
            why=f"it is {limit!r}",
            fix="write a positive whole number, or leave it out",
        )


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_message, value)))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _encoded(row: Mapping[str, Any], encode: Encode, *, place: str) -> tuple[str, Ints]:
    given = {} if row.get("tools") is None else {"tools": row["tools"]}
    try:
        text, token_ids = encode(row["prompt"], **given)
    except Exception as exc:  # a chat template may raise anything, and refuses roles by raising
        raise DataError(
            f"the prompt of {place} cannot be encoded",
            why=str(exc) or repr(exc),
            fix="fix the row; without a chat template of the tokenizer, set data.chat_template, or write a string",
        ) from exc
    return text, np.array(token_ids, dtype=np.int32)


def check_vocabulary(prompts: Iterable[Prompt], *, path: Path, vocabulary: int) -> None:
    """Raise DataError, with the row's number, if a prompt of ``path`` has a token id of ``vocabulary`` or more."""
    for number, prompt in enumerate(prompts, start=1):
        if prompt.token_ids.max() >= vocabulary:
            raise DataError(
                f"{path}, row {number} has a token unknown to the model",
                why=f"it is token {prompt.token_ids.max()}, and the model has {vocabulary} (vocab_size in config.json)",
                fix="put the model's own tokenizer into model.path",
            )


def _rows(
    path: Path, *, key: str = "data.train or data.eval", content: bytes | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the content of each row; raise the errors of :func:`check_prompts`."""
    if not path.is_file():
        raise DataError(f"there is no file {path}", why=f"{key} names it", fix="correct the path")
    if path.suffix not in _READERS:
        raise DataError(
            f"{path} is of an unknown kind",
            why=f"its name must end in {' or '.join(_READERS)}",
            fix="convert or rename the file",
        )

    place = None
    for place, row in _READERS[path.suffix](path, path.read_bytes() if content is None else content):
        _check_row(row, place=place)
        yield place, row
    if place is None:
        raise DataError(f"{path} holds no prompts", why="the file has no rows", fix="add at least one row")


def _json_lines(path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    with io.BytesIO(content) as lines:
        for number, line in enumerate(lines, start=1):
            line = line.strip()
            if not line:
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as exc:
                why = f"{exc.msg}, column {exc.colno}" if isinstance(exc, json.JSONDecodeError) else str(exc)
                raise DataError(f"{place} is not JSON", why=why, fix="correct the line") from exc
            yield place, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # json would keep the last one
        raise ValueError(f"a key appears twice in one object: {[key for key, _ in pairs]}")
    return found


def _parquet_rows(path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as exc:  # OSError: a damaged page
        raise DataError(f"{path} cannot be read as Parquet", why=str(exc), fix="write the file again") from exc
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


_READERS: dict[str, Callable[[Path, bytes], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet_rows,
}
