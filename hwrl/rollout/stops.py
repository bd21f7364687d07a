"""Find the stop text or stop token at the end of a response, token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from hwrl.errors import EngineError
from hwrl.interfaces import GenerationRequest, Sampling
from hwrl.rollout.chat import decode_text

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, special tokens included."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""A decoded text ends with it if the tokens have only the first bytes of the last character."""
_MOST_BYTES = 4
"""The most bytes of a character in UTF-8, and so the most tokens."""


class StopFinder:
    """Looks for the stops of one response while its tokens arrive.

    A stop text may begin and end inside a token. The finder decodes only a window of the newest tokens. The window also
    has the tokens just before them, because a token's text may depend on its neighbour. It grows while a character is
    incomplete.
    """

    def __init__(self, sampling: Sampling, decode: Decode | None) -> None:
        self._texts, self._ids = sampling.stop, frozenset(sampling.stop_token_ids)
        self._decode = decode
        self._kept = max(map(len, sampling.stop), default=1) - 1  # characters of an unfinished stop text
        self._tokens: list[int] = []  # the window
        self._read = 0  # how many tokens of the window were searched before
        self._tail = ""  # the end of the searched text: a stop text may have begun in it

    def find(self, token_id: int) -> str | int | None:
        """Take the next token; return the stop text or token that it completes, or None.

        If it completes several texts, the one that begins first counts, and of those the longest.
        """
        if token_id in self._ids:
            return token_id
        if self._decode is None or not self._texts:
            return None
        self._tokens.append(token_id)
        known = self._decode(self._tokens[: self._read])
        text = self._decode(self._tokens)
        seen = self._tail + text[len(known) :]
        found = [(place, -len(stop), stop) for stop in self._texts if (place := seen.find(stop)) >= 0]
        is_whole = len(text) > len(known) and not text.endswith(_INCOMPLETE)
        if is_whole or len(self._tokens) - self._read == _MOST_BYTES:
            del self._tokens[: self._read]
            self._read = len(self._tokens)
            self._tail = seen[max(0, len(seen) - self._kept) :]
        return min(found)[2] if found else None


def stop_finder(request: GenerationRequest, decode: Decode | None) -> StopFinder | None:
    """Return a finder for the stops of ``request``; None if it has none.

    Raises EngineError for stop texts without ``decode``.
    """
    sampling = request.sampling
    if sampling.stop and decode is None:
        raise EngineError(
            f"request {request.request_id} has stop texts, and the engine has no tokenizer to find them",
            why=f"its stops are {sampling.stop!r}, and the engine was made without decode",
            fix="make the engine with decode, or use stop_token_ids",
        )
    return StopFinder(sampling, decode) if sampling.stop or sampling.stop_token_ids else None


def text_decoder(model_directory: Path) -> Decode:
    """Return a function that decodes with the tokenizer in ``model_directory``.

    The first call reads the tokenizer. It raises DataError if there is none.
    """

    @functools.cache
    def decode() -> Decode:
        from hwrl.models import load_tokenizer

        return functools.partial(decode_text, load_tokenizer(model_directory), special=True)

    return lambda token_ids: decode()(token_ids)
