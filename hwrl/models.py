"""Load models, configurations and tokenizers of transformers from local directories, with clear errors."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import itertools
import logging
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from hwrl.errors import ConfigError, DataError
from hwrl.files import open_to_read
from hwrl.memory import own_memory

_log = logging.getLogger("hwrl.models")

EAGER = "eager"
"""transformers' attention without a kernel of torch. Its masks are added to the scores."""

_CODE = "trust_remote_code"
"""Every error of transformers about a directory with Python code contains this."""

_POSITIONS = re.compile(r"(^|\.)(wpe|\w*(position|pos_e)\w*)(\.|$)")
"""The names of tables with one row for each position."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_READ = (*_WEIGHT_SUFFIXES, ".json", ".jinja", ".model", ".txt")
"""The suffixes of the files in a model's directory that transformers reads."""


def build_model(directory: Path, *, dtype: torch.dtype, max_length: int | None = None) -> Any:
    """Return the model of ``directory`` with its generation settings, but with arbitrary weights.

    Reads configuration files only. Write every weight before using the model. ``max_length`` is the number of tokens in
    the run's longest row (None: what its configuration names): the rotary frequencies are those for it
    (:func:`rope_changes`). Raises ConfigError if the model has no positions for so many tokens. The weights are never
    quantized: files with quantized ones are read as ``dtype``.
    """
    config = load_model_config(directory)
    with translated_errors(directory):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.get_text_config().update(rope_changes(config, max_length=max_length))
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention_of(config), trust_remote_code=False
            )
        model.generation_config = load_generation_config(directory)
        model.tie_weights()
    _require_positions(directory, model, max_length)
    return model


def build_meta_model(directory: Path, *, dtype: torch.dtype, max_length: int | None = None) -> Any:
    """Return :func:`build_model` with parameters on the meta device: they have shapes and no memory.

    Buffers are on the host, with the values that the model's class gives them.
    """
    with _parameters_on_meta():
        return build_model(directory, dtype=dtype, max_length=max_length)


def attention_of(config: Any) -> str:
    """Return transformers' attention for ``config``: the one without torch's kernel where only it is right."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return "sdpa" if getattr(kind, "_supports_sdpa", True) else EAGER


def rope_changes(config: Any, *, max_length: int | None, always: bool = False) -> dict[str, Any]:
    """Return what to change in a text model's ``config`` so that its rotary frequencies are those for ``max_length``.

    transformers chooses the frequencies of "dynamic" and "longrope" by the longest row of each call, so a row's result
    would depend on the rows beside it, and on how much of it is there. Fixed for the run's longest row, "dynamic" is
    plain rotation with another base, and "longrope" has its long factors for all rows. Nothing changes if no row of
    ``max_length`` tokens (None: what the configuration names) leaves the original length; with ``always``, "dynamic"
    does then, too, for engines that stretch it for all rows.
    """
    text = config.get_text_config()
    kinds = getattr(text, "rope_parameters", None) or {}
    nested = "rope_type" not in kinds
    most = getattr(text, "max_position_embeddings", None) or 0
    longest, changed = max_length or most, {}
    for name, rope in (kinds if nested else {"": kinds}).items():
        original = rope.get("original_max_position_embeddings", most)
        if rope.get("rope_type") == "longrope" and longest > original and rope["short_factor"] != rope["long_factor"]:
            changed[name] = {**rope, "short_factor": rope["long_factor"]}
        elif rope.get("rope_type") == "dynamic" and not rope.get("alpha") and (always or longest > most):
            head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            size, factor = int(head * rope.get("partial_rotary_factor", 1.0)), rope["factor"]
            stretch = factor * max(longest, most) / most - (factor - 1)
            base = rope["rope_theta"] * stretch ** (size / (size - 2))
            plain = {key: value for key, value in rope.items() if key != "factor"}
            changed[name] = {**plain, "rope_type": "default", "rope_theta": base}
    if not changed:
        return {}
    parameters = {**kinds, **changed} if nested else changed[""]
    return {"rope_parameters": parameters, "max_position_embeddings": max(longest, most)}


def _require_positions(directory: Path, model: Any, max_length: int | None) -> None:
    """Raise ConfigError if ``model`` has a table of positions that is shorter than ``max_length``."""
    text = model.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if max_length is None or most is None or max_length <= most:
        return
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    tables = [name for name, one in tensors if one.dim() == 2 and _POSITIONS.search(name) and len(one) >= most]
    if tables:
        key = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ConfigError(
            f"the model in {directory} has no positions for the run's longest row",
            why=f"a prompt with its response may have {max_length} tokens, and its config.json has {key}={most}, the "
            f"rows of {tables[0]}",
            fix=f"lower data.max_prompt_tokens and rollout.max_new_tokens (or rollout.max_model_len) to at most {most} "
            "in all",
        )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter that a module registers inside the block to the meta device. Not for several threads.

    Under ``torch.device("meta")`` buffers would lose their values, too, and no file has those of rotary embeddings.
    """
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment] # no hook gets the module
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign] # as above


def load_model_config(directory: Path) -> Any:
    """Return transformers' configuration of the model in ``directory``; DataError if it cannot be read."""
    _require_directory(directory)
    with translated_errors(directory):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def load_generation_config(directory: Path) -> Any:
    """Return the generation settings in ``directory``, or else those of the model's configuration."""
    config = load_model_config(directory)
    with translated_errors(directory):
        if (directory / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(directory, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def uses_attention_interface(model: Any) -> bool:
    """Return whether the attention of ``model`` can be replaced: its code uses transformers' AttentionInterface."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")]
    return bool(kinds) and bool(kinds[0]._can_set_attn_implementation())  # type: ignore[attr-defined] # transformers'


def use_working_experts(model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Let ``model`` run its experts one after the other if ``device`` cannot multiply groups of rows in one operation.

    transformers chooses the grouped product by the version of torch, for every device. Here the operation proves
    itself first, forward and backward, in ``dtype`` and the shapes of the model. Other models stay as they are.
    """
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        return
    try:
        for shape in sorted({tuple(one.shape[1:]) for one in model.parameters() if one.dim() > 2}):
            _multiply_groups(shape, device=device, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as exc:  # NotImplementedError is a RuntimeError
        _log.warning("Experts run one after the other: %s", " ".join(str(exc).split())[:200])
        model.set_experts_implementation("eager")


def _multiply_groups(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> None:
    """Multiply rows by two matrices of ``shape`` (outputs × inputs), backward too; ValueError if results are wrong."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is None or len(shape) != 2:  # then transformers multiplies in another way
        return
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, *shape, generator=generator).to(device, dtype).requires_grad_()
    rows = torch.randn(6, shape[1], generator=generator).to(device, dtype).requires_grad_()
    ends = torch.tensor([2, 6], dtype=torch.int32, device=device)
    results = []
    for result in (
        grouped(rows, weight.transpose(1, 2), offs=ends),
        torch.cat([rows[:2] @ weight[0].T, rows[2:] @ weight[1].T]),
    ):
        results.append([result.detach(), *torch.autograd.grad(result, [rows, weight], torch.ones_like(result))])
    for one, wanted in zip(*results, strict=True):
        off = float((one.float() - wanted.float()).norm() / wanted.float().norm())
        if not off <= 0.02:
            raise ValueError(f"torch's grouped product of {list(shape)} is off by {off:.2g} of its norm")


def vocabulary_size(directory: Path) -> int:
    """Return the vocabulary size of the model in ``directory``; its tokenizer may have fewer tokens."""
    config = load_model_config(directory)
    with translated_errors(directory):
        return int(config.get_text_config().vocab_size)


def load_model(directory: Path, *, dtype: torch.dtype) -> Any:
    """Return the model in ``directory``, on the host; DataError if transformers cannot read one.

    Also raises DataError if the files lack a tensor, hold an unknown one or one of another shape. Transformers would
    fill a missing tensor with random numbers.
    """
    require_no_adapter(directory)
    config = _dequantized(load_model_config(directory))
    with translated_errors(directory):
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=attention_of(config),
            ignore_mismatched_sizes=True,  # ``found`` lists them; the error would not
            output_loading_info=True,
        )
    _require_complete(directory, model, found)
    if any(not one.is_floating_point() or one.itemsize == 1 for one in model.parameters()):
        raise _unusable(
            directory,
            "its weights are quantized in a way that transformers does not undo on this machine",
            what="model",
            fix="save it without quantization",
        )
    own_memory(model)  # it is mapped from the file, and could not be offloaded
    return model


def _dequantized(config: Any) -> Any:
    """Let transformers undo the quantization of ``config``, if it has one; where a device has kernels, it would not."""
    if isinstance(quantization := getattr(config, "quantization_config", None), dict):
        quantization["dequantize"] = True
    return config


def require_no_adapter(directory: Path) -> None:
    """Raise DataError if ``directory`` is none, or holds an adapter: transformers would read another model."""
    _require_directory(directory)
    if (directory / "adapter_config.json").exists():
        raise _unusable(
            directory,
            "it has an adapter_config.json, so transformers would read another directory's weights",
            what="model",
            fix="merge the adapter into its model and save that, or remove adapter_config.json",
        )


def require_loadable(directory: Path, model: Any, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Raise DataError if files with tensors of ``shapes`` do not fit ``model``, as :func:`load_model` would.

    transformers renames and joins tensors as it loads them. This lets it do so with meta tensors, and reads no file.
    Return False, without an answer, if accelerate is not installed: transformers needs it for meta tensors.
    """
    if importlib.util.find_spec("accelerate") is None:
        return False
    tensors = {name: torch.empty(tuple(shape), dtype=model.dtype, device="meta") for name, shape in shapes.items()}
    with translated_errors(directory):
        _, found = type(model).from_pretrained(
            None,
            config=_dequantized(load_model_config(directory)),
            dtype=model.dtype,
            state_dict=tensors,
            device_map={"": "meta"},
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _raise_differences(directory, _differences(found))
    return True


def _require_complete(directory: Path, model: Any, found: Mapping[str, Any]) -> None:
    """Raise DataError if ``found``, transformers' loading info, has a missing, unknown or misshapen tensor."""
    differences = _differences(found)
    inside, outside = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.get_text_config().tie_word_embeddings and outside.weight is not inside.weight:
        differences.append(
            "config.json has tie_word_embeddings=true, and the files hold embeddings and an output layer apart"
        )
    _raise_differences(directory, differences)


def _differences(found: Mapping[str, Any]) -> list[str]:
    misshapen = [f"{name} ({list(had)} there, {list(wanted)} here)" for name, had, wanted in found["mismatched_keys"]]
    mistakes = {"lacks": found["missing_keys"], "has, but the model does not,": found["unexpected_keys"]}
    mistakes["has in another shape"] = misshapen
    return [f"it {verb} {_some(names)}" for verb, names in mistakes.items() if names]


def require_present(directory: Path, missing: Collection[str]) -> None:
    """Raise DataError if tensors are ``missing`` in the files of ``directory``."""
    _raise_differences(directory, [f"it lacks {_some(missing)}"] if missing else [])


def _raise_differences(directory: Path, differences: Sequence[str]) -> None:
    if differences:
        raise DataError(
            f"the tensors in {directory} do not fit the model in its config.json",
            why="; ".join(differences),
            fix="download or save the model again; or correct its config.json",
        )


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


def model_identity(directory: Path) -> int:
    """Return a hash below 2**60 of the model in ``directory``: its configuration and all its weights.

    Reads every weight file: about one second for two gigabytes.
    """
    _require_directory(directory)
    identity = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.name == "config.json" or path.suffix in _WEIGHT_SUFFIXES:
            with open_to_read(path, follow_links=True) as file:
                identity.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return int.from_bytes(identity.digest()[:8], "big") >> 4


def logits_at(model: Any, places: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Run ``model`` on ``inputs``; return the logits at ``places`` only (places × vocabulary).

    ``places`` (int64) are indices into the flattened inputs (rows · length).

    The output layer gets the hidden states of these positions alone, so other logits are never computed.
    """

    def choose(_: Any, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return hidden[0].flatten(0, 1).index_select(0, places)[None]

    with model.get_output_embeddings().register_forward_pre_hook(choose):
        return model(**inputs).logits[0]  # type: ignore[no-any-return] # transformers is not followed by mypy


def cache_argument(model: Any) -> str:
    """Return the name of the attention cache among the arguments of the model's ``forward``.

    transformers 5.24 renames it from ``past_key_values`` to ``cache``, and 5.40 drops the old name. Delete this
    function when hwrl needs 5.24.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in ``directory``; DataError if transformers cannot read one."""
    _require_directory(directory)
    with translated_errors(directory, what="tokenizer", fix="put the model's tokenizer files into the directory"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def use_chat_template(tokenizer: Any, template: str | None, *, options: Mapping[str, Any]) -> None:
    """Let ``tokenizer`` apply ``template`` (None: its own) with ``options`` from now on; a caller's options win.

    The options become a part of the template, so a saved tokenizer has them, too. Raises ConfigError for an option that
    the template does not name: it would change nothing. An option cannot be an argument of ``apply_chat_template``.
    """
    if template is not None:
        tokenizer.chat_template = template
    if not options:
        return
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    text = str(tokenizer.chat_template)  # several templates are a mapping
    for name in options:
        if name in reserved or not name.isidentifier() or not re.search(rf"\b{re.escape(name)}\b", text):
            raise ConfigError(
                f"data.chat_template_kwargs.{name} cannot be set",
                why="hwrl sets it" if name in reserved else "the chat template never uses it, so it would do nothing",
                fix="remove it, or correct its name",
            )
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"  # Jinja drops this newline
        for name, value in options.items()
    )
    own = tokenizer.chat_template
    several = isinstance(own, dict)
    tokenizer.chat_template = {name: defaults + one for name, one in own.items()} if several else defaults + own


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise DataError(
            f"there is no directory {directory}", why="models are read from the disk only", fix="correct model.path"
        )
    files = sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")])
    if odd := [path for path in files if path.suffix in _READ and not path.is_file()]:
        raise DataError(  # transformers would take the file for missing, and use defaults or other files
            f"{odd[0]} cannot be read",
            why="it is a link to a missing file, or no regular file",
            fix="download or save the model again",
        )


@contextlib.contextmanager
def translated_errors(
    directory: Path,
    *,
    what: str = "model",
    fix: str = "name a directory that AutoModelForCausalLM.from_pretrained can load",
) -> Iterator[None]:
    """Turn every error of transformers about the files in ``directory`` into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as exc:
        if _CODE in str(exc):
            why = "its files name Python code to run, and hwrl runs no code from a model directory"
            fix = "use an architecture of transformers itself"
        elif isinstance(exc, pickle.UnpicklingError):  # torch's message advises an unsafe load
            why = "a .bin file is damaged, or holds other objects than tensors"
        else:
            why = f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"
        raise _unusable(directory, why, what=what, fix=fix) from exc


def _unusable(directory: Path, why: str, *, what: str, fix: str) -> DataError:
    return DataError(f"{directory} holds no loadable {what}", why=why, fix=fix)
