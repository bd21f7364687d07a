"""The user's prompts: the rows are checked when they are read, and tokenised when they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from hwrl.errors import DataError, message_of
from hwrl.interfaces import Ints
from hwrl.rollout.chat import TooLongError
from hwrl.rollout.reward import check_columns
from hwrl.rollout.rows import read_rows

Messages = list[dict[str, Any]]
"""A conversation. Each message has the strings ``role`` and ``content``, and any other keys for the chat template."""
Encode = Callable[..., "tuple[str, Sequence[int] | Ints]"]
"""Turns a prompt (a string or messages) into the model's input, as text and as token ids. If the row has a column
``tools``, the function gets it as ``tools=``."""

_FIX_LENGTH = "drop or shorten the row, or raise data.max_prompt_tokens"
_LIMIT = "max_new_tokens"
"""The column with a prompt's own limit on the tokens of a response."""


@dataclass(frozen=True)
class Prompt:
    """One row: the prompt as text and as token ids (int32), and the ``answer`` for the reward function.

    A prompt of messages has them in ``messages``, and its ``text`` comes from the chat template. ``max_new_tokens``
    limits each response to this prompt. ``row`` has the row's other columns, by name. ``source`` is the name of the
    data set; it is empty if there is only one.
    """

    text: str
    token_ids: Ints
    answer: Any
    max_new_tokens: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    messages: Messages | None = None


@dataclass(frozen=True)
class DataKeys:
    """The names of the columns with the prompt and the answer."""

    prompt: str = "prompt"
    answer: str = "answer"

    def others(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of ``row`` that hwrl itself does not use."""
        return {name: value for name, value in row.items() if name not in (self.prompt, self.answer, _LIMIT)}


class Prompts(Sequence[Prompt]):
    """The prompts of the data set ``path``: a ``.jsonl`` or ``.parquet`` file, a directory from
    ``Dataset.save_to_disk``, or a name on the hub (``hf:NAME?split=SPLIT``).

    A row has a prompt (a string or messages) and an answer (any value), in the columns that ``keys`` names. A column
    ``max_new_tokens`` is optional; it lowers the run's limit on a response. If ``content`` is given, it is used instead
    of the file's bytes. ``source`` is the data set's name. Raises the errors of :func:`check_prompts`.

    A prompt is encoded at its first use. That raises DataError, with the row's place, if ``encode`` fails, or if the
    prompt has no token, more than ``max_prompt_tokens``, or a token id of ``vocabulary`` or above.
    """

    def __init__(
        self,
        path: Path,
        *,
        encode: Encode,
        max_prompt_tokens: int,
        vocabulary: int | None = None,
        content: bytes | None = None,
        keys: DataKeys = DataKeys(),
        source: str = "",
    ) -> None:
        self._encode, self._longest, self._vocabulary = encode, max_prompt_tokens, vocabulary
        self._keys, self._source = keys, source
        self._rows: list[tuple[str, dict[str, Any]] | Prompt] = []
        for place, row in read_rows(path, key="data.train or data.eval", content=content):
            _check_row(row, keys, place=place)
            self._rows.append((place, row))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        found = self._rows[index]
        if not isinstance(found, Prompt):
            found = self._rows[index] = self._encoded(*found)
        return found

    def _encoded(self, place: str, row: dict[str, Any]) -> Prompt:
        prompt = row[self._keys.prompt]
        options = {} if row.get("tools") is None else {"tools": row["tools"]}
        try:
            text, encoded = self._encode(prompt, **options)
        except TooLongError as exc:
            raise DataError(f"{place} has too long a prompt", why=f"{exc.what}: {exc.why}", fix=_FIX_LENGTH) from exc
        except Exception as exc:  # a chat template may raise anything, and refuses roles by raising
            raise DataError(
                f"the prompt of {place} cannot be encoded",
                why=f"{exc.what}: {exc.why}" if isinstance(exc, DataError) else message_of(exc),
                fix="fix the row; without a chat template of the tokenizer, set data.chat_template, or write a string",
            ) from exc
        token_ids = np.array(encoded, dtype=np.int32)
        if not 1 <= len(token_ids) <= self._longest:
            raise DataError(
                f"{place} has a prompt of {len(token_ids)} tokens",
                why=f"1 to {self._longest} are allowed (data.max_prompt_tokens)",
                fix=_FIX_LENGTH,
            )
        if self._vocabulary is not None and token_ids.max() >= self._vocabulary:
            raise DataError(
                f"{place} has a token unknown to the model",
                why=f"it is token {token_ids.max()}, and the model has {self._vocabulary} (vocab_size in config.json)",
                fix="put the model's own tokenizer into model.path",
            )
        messages = None if isinstance(prompt, str) else prompt
        others = self._keys.others(row)
        return Prompt(text, token_ids, row[self._keys.answer], row.get(_LIMIT), others, self._source, messages)


def check_prompts(
    path: Path,
    *,
    key: str,
    keys: DataKeys = DataKeys(),
    columns: Collection[str] = (),
) -> None:
    """Check the rows of ``path`` without a tokenizer. ``key`` is the configuration key with the path.

    Raises DataError if the data set is missing, empty or of an unknown kind. Raises it, with the row's place, if a row
    has no valid prompt, answer or limit, or if it lacks one of ``columns``, the columns for the reward function.
    """
    for place, row in read_rows(path, key=key):
        _check_row(row, keys, place=place)
        check_columns(columns, keys.others(row), place=place)


def _check_row(row: Any, keys: DataKeys, *, place: str) -> None:
    if not isinstance(row, dict) or keys.answer not in row or not _is_prompt(row.get(keys.prompt)):
        raise DataError(
            f"{place} is not a prompt",
            why=f"it needs a {keys.prompt!r} (a string, or a list of messages with the strings 'role' and 'content') "
            f"and an {keys.answer!r}; it is {str(row)[:80]!r}",
            fix='write rows like {"prompt": "2 + 2 =", "answer": "4"}, or '
            '{"prompt": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}; data.prompt_key and '
            "data.answer_key name other columns",
        )
    limit = row.get(_LIMIT)
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
