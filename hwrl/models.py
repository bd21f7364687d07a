"""Model directories: what ``AutoModelForCausalLM`` and ``AutoTokenizer`` read from the disk, with clear errors."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from hwrl.errors import DataError

_ATTENTION = "sdpa"
"""The attention whose masks may be boolean and four-dimensional, as continuous batching needs them."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin")


def build_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """Return the model that ``directory`` describes, with its generation settings, but with arbitrary weights.

    It reads configurations and nothing else; every weight must be written before the model is used.
    """
    _require_directory(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    except (OSError, ValueError) as exc:
        raise _not_a_model(directory, exc) from exc
    model.generation_config = load_generation_config(directory)
    model.tie_weights()
    return model


def load_generation_config(directory: Path) -> Any:
    """Return the generation settings in ``directory``, those of the model's configuration if it has none of its own."""
    _require_directory(directory)
    try:
        if (directory / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(directory, local_files_only=True)
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise _not_a_model(directory, exc) from exc


def vocabulary_size(directory: Path) -> int:
    """Return how many tokens the model in ``directory`` knows, which may be more than its tokenizer has."""
    _require_directory(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise _not_a_model(directory, exc) from exc
    return int(config.get_text_config().vocab_size)


def load_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """Return the model in ``directory``, on the host; DataError if there is none that transformers can read."""
    _require_directory(directory)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, attn_implementation=_ATTENTION
        )
    except (OSError, ValueError) as exc:
        raise _not_a_model(directory, exc) from exc
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not tensor.untyped_storage().resizable():  # mapped from the file, which may change and cannot be offloaded
            tensor.data = tensor.data.clone()
    return model


def model_identity(directory: Path) -> int:
    """Return a number below 2**60 that identifies the model in ``directory``: its configuration and all its weights.

    Reads every weight file, which takes about a second for two gigabytes.
    """
    _require_directory(directory)
    identity = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.name == "config.json" or path.suffix in _WEIGHT_SUFFIXES:
            with path.open("rb") as file:
                identity.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return int.from_bytes(identity.digest()[:8], "big") >> 4


def logits_at(model: Any, rows: torch.Tensor, columns: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Run ``model`` on ``inputs`` and return the logits at ``rows`` and ``columns`` only (places × vocabulary).

    Logits of other places are never computed: the output layer sees the hidden states of these alone.
    """

    def choose(_: Any, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return hidden[0][rows, columns][None]

    with model.get_output_embeddings().register_forward_pre_hook(choose):
        return model(**inputs).logits[0]  # type: ignore[no-any-return] # transformers is not followed by mypy


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in ``directory``; DataError if there is none that transformers can read."""
    _require_directory(directory)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise DataError(
            f"{directory} holds no tokenizer",
            why=str(exc).splitlines()[0],
            fix="put the model's tokenizer files into the directory",
        ) from exc


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Return the text and the token ids that the model reads: a text as the tokenizer encodes it, special tokens
    included; messages as the tokenizer's chat template writes them, up to where the answer begins.

    Raises whatever the template raises, and ValueError if there is none.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has written them


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise DataError(
            f"there is no directory {directory}", why="models are read from the disk only", fix="correct model.path"
        )


def _not_a_model(directory: Path, exc: Exception) -> DataError:
    return DataError(
        f"{directory} holds no model",
        why=str(exc).splitlines()[0],
        fix="name a directory that AutoModelForCausalLM.from_pretrained can load",
    )
