"""Stop texts are found at the token that completes them, with a real byte-level tokenizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.interfaces import GenerationRequest, Sampling
from hwrl.rollout import StopFinder, stop_finder, text_decoder

TEXT = "The café “naïve” costs 5 € — 你好, 世界! </answer> done. 🙂🙃 <tool_call>{}</tool_call>\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def first_whole(decode: Any, tokens: list[int], stop: str) -> int:
    """Return how many tokens have a text with ``stop``; more than there are if it never comes."""
    for count in range(1, len(tokens) + 1):
        if stop in decode(tokens[:count]):
            return count
    return len(tokens) + 1


def test_stops_are_found_where_the_whole_text_has_them(tokenizer: Any) -> None:
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    rng, found = np.random.default_rng(0), 0
    for _ in range(60):
        pieces = [TEXT[a : a + 12] for a in rng.integers(0, len(TEXT) - 1, size=4)]
        tokens = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
        tokens.insert(int(rng.integers(0, len(tokens))), 0)
        if rng.random() < 0.5:  # not what the tokenizer would write: single bytes, and halves of characters
            tokens[3:3] = rng.integers(1, 257, size=3).tolist()
        for stop in ("</answer>", "é", "€ —", "世界", "🙂", "<|end|>", "e ", " "):
            finder = StopFinder(Sampling(1, stop=(stop,)), decode)
            places = [place for place, token in enumerate(tokens, start=1) if finder.find(token) is not None]
            wanted = first_whole(decode, tokens, stop)
            found += wanted <= len(tokens)
            assert (places or [len(tokens) + 1])[0] == wanted, (stop, [decode([one]) for one in tokens])
    assert found > 100


def test_the_earliest_stop_is_named_and_of_those_the_longest() -> None:
    finder = StopFinder(Sampling(1, stop=("c", "bc", "bcd", "x")), lambda ids: "".join("abcdx"[token] for token in ids))
    assert [finder.find(token) for token in (0, 1)] == [None, None]
    assert finder.find(2) == "bc"


def test_many_broken_characters_stay_cheap() -> None:
    sizes = []

    def decode(ids: Any) -> str:
        sizes.append(len(ids))
        return "\N{REPLACEMENT CHARACTER}" * len(ids)

    finder = StopFinder(Sampling(1, stop=("stop",)), decode)
    assert [finder.find(7) for _ in range(200)] == [None] * 200
    assert max(sizes) <= 8


def test_only_requests_with_stops_get_a_finder(tmp_path: Path) -> None:
    def finder(**settings: Any) -> StopFinder | None:
        return stop_finder(GenerationRequest(0, np.array([1], dtype=np.int32), Sampling(1, **settings)), decode)

    decode = text_decoder(tmp_path)
    assert finder() is None
    finder_of_tokens = finder(stop_token_ids=(3,))
    assert finder_of_tokens is not None and [finder_of_tokens.find(token) for token in (2, 3)] == [None, 3]
    finder_of_texts = finder(stop=("x",))
    assert finder_of_texts is not None
    with pytest.raises(DataError, match="holds no loadable tokenizer"):
        finder_of_texts.find(1)
