"""Model directories: what ``AutoModelForCausalLM`` and ``AutoTokenizer`` read from the disk, with clear errors."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from hwrl.errors import DataError

_ATTENTION = "sdpa"
"""The attention whose masks may be boolean and four-dimensional, as continuous batching needs them."""

_CODE = "trust_remote_code"
"""In every error of transformers about a directory that needs Python code of its own."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin")


def build_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """Return the model that ``directory`` describes, with its generation settings, but with arbitrary weights.

    It reads configurations and nothing else; every weight must be written before the model is used.
    """
    config = load_model_config(directory)
    with _translated(directory):
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=False
            )
        model.generation_config = load_generation_config(directory)
        model.tie_weights()
    return model


def load_model_config(directory: Path) -> Any:
    """Return transformers' configuration of the model in ``directory``; DataError if it cannot be read."""
    _require_directory(directory)
    with _translated(directory):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def load_generation_config(directory: Path) -> Any:
    """Return the generation settings in ``directory``, those of the model's configuration if it has none of its own."""
    config = load_model_config(directory)
    with _translated(directory):
        if (directory / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(directory, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def vocabulary_size(directory: Path) -> int:
    """Return how many tokens the model in ``directory`` knows, which may be more than its tokenizer has."""
    config = load_model_config(directory)
    with _translated(directory):
        return int(config.get_text_config().vocab_size)


def load_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """Return the model in ``directory``, on the host; DataError if there is none that transformers can read.

    DataError also if its files lack a tensor of the model, hold one more, or hold one of another shape: transformers
    would fill a missing tensor with random numbers.
    """
    _require_directory(directory)
    if (directory / "adapter_config.json").exists():
        raise _unusable(
            directory,
            "it has an adapter_config.json, so transformers would read another directory's weights",
            what="model",
            fix="merge the adapter into its model and save that, or remove adapter_config.json",
        )
    with _translated(directory):
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=_ATTENTION,
            ignore_mismatched_sizes=True,  # listed in ``found``; else the error does not name them
            output_loading_info=True,
        )
    _require_complete(directory, model, found)
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not tensor.untyped_storage().resizable():  # mapped from the file, which may change and cannot be offloaded
            tensor.data = tensor.data.clone()
    return model


def _require_complete(directory: Path, model: Any, found: Mapping[str, Any]) -> None:
    """Raise DataError if ``found``, transformers' loading info, has a tensor that is missing, unknown or misshapen."""
    misshapen = [f"{name} ({list(had)} there, {list(wanted)} here)" for name, had, wanted in found["mismatched_keys"]]
    mistakes = {"lacks": found["missing_keys"], "has, but the model does not,": found["unexpected_keys"]}
    mistakes["has in another shape"] = misshapen
    told = [f"it {verb} {_some(names)}" for verb, names in mistakes.items() if names]
    inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.get_text_config().tie_word_embeddings and outside.weight is not inside.weight:
        told.append("config.json has tie_word_embeddings=true, and the files hold embeddings and an output layer apart")
    if told:
        raise DataError(
            f"the tensors in {directory} are not those of the model that its config.json describes",
            why="; ".join(told),
            fix="download or save the model again; or correct its config.json, if that is wrong",
        )


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


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
    with _translated(directory, what="tokenizer", fix="put the model's tokenizer files into the directory"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


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


@contextlib.contextmanager
def _translated(
    directory: Path,
    *,
    what: str = "model",
    fix: str = "name a directory that AutoModelForCausalLM.from_pretrained can load",
) -> Iterator[None]:
    """Raise DataError for everything that transformers raises about the files in ``directory``."""
    try:
        yield
    except DataError:
        raise
    except Exception as exc:
        if _CODE in str(exc):
            why = "its files name Python code to run, and hwrl runs no code that comes with a model"
            fix = "use a model that transformers itself has"
        else:
            why = _why(exc)
        raise _unusable(directory, why, what=what, fix=fix) from exc


def _why(exc: Exception) -> str:
    if isinstance(exc, pickle.UnpicklingError):  # torch's own words advise to load it unsafely
        return "a .bin file is damaged, or holds something that is no tensor"
    words = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {words[:300]}"


def _unusable(directory: Path, why: str, *, what: str, fix: str) -> DataError:
    return DataError(f"{directory} holds no {what} that can be loaded", why=why, fix=fix)
