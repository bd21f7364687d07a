"""Explain mistakes in a configuration: pydantic's errors as sentences, with suggestions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel

_MAX_SHOWN = 100
_MAX_LEAVES = 20
RENAMED = {"reward.threads": "reward.workers, which counts processes", "critic.kl_coef": "critic.kl_coeff"}
"""Keys of earlier versions, each with the key that has replaced it."""
SAME_AS = {
    "optimizer.learning_rate": ("lr",),
    "critic.learning_rate": ("critic_lr",),
    "optimizer.max_grad_norm": ("grad_clip", "clip_grad", "gradient_clip_val"),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.warmup_steps": ("warmup", "lr_warmup_steps", "warmup_ratio", "lr_warmup_steps_ratio"),
    "optimizer.min_learning_rate_ratio": ("min_lr_ratio", "lr_scheduler_type"),
    "train.steps": ("max_steps", "total_training_steps", "num_steps", "epochs", "num_train_epochs", "total_epochs"),
    "train.batch_groups": ("batch_size", "train_batch_size", "global_batch_size", "per_device_train_batch_size"),
    "train.micro_batch_tokens": ("micro_batch_size", "ppo_max_token_len_per_device", "gradient_accumulation_steps"),
    "seed": ("random_seed",),
    "train.engine": ("train.backend", "train.strategy"),
    "rollout.engine": ("rollout.backend", "rollout.name"),
    "weights.bypass_cpu": ("weights.transport", "weights.backend"),
    "train.ranks": ("world_size", "num_processes", "n_devices_per_node", "nnodes", "num_nodes"),
    "train.activation_checkpointing": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "rollout.n": ("num_generations", "group_size", "n_samples_per_prompt", "num_samples", "rollouts_per_prompt"),
    "rollout.max_new_tokens": ("max_completion_length", "max_response_length", "response_length", "max_tokens"),
    "rollout.tensor_parallel": ("tensor_parallel_size", "tensor_model_parallel_size", "tp", "tp_size"),
    "rollout.max_running": ("max_num_seqs", "max_concurrency", "max_running_requests"),
    "data.max_prompt_tokens": ("max_prompt_length", "prompt_length"),
    "data.train": ("dataset", "dataset_name", "train_files", "train_dataset", "prompt_data", "data.path"),
    "data.eval": ("val_files", "eval_dataset", "test_files", "val_data"),
    "data.prompt_key": ("input_key",),
    "data.answer_key": ("label_key", "ground_truth", "answer"),
    "model.path": (
        "model_name_or_path",
        "model_name",
        "pretrain",
        "hf_checkpoint",
        "tokenizer",
        "model_path",
        "model.name",
        "model.name_or_path",
        "critic.name",
    ),
    "model.dtype": ("bf16", "fp16", "precision", "torch_dtype"),
    "model.lora_rank": ("lora_r", "r", "use_peft", "lora.rank", "peft.rank"),
    "model.lora_alpha": ("lora.alpha", "peft.alpha"),
    "dir": ("output_dir", "default_local_dir", "save_path", "run_dir", "ckpt_path"),
    "report.run_name": ("experiment_name", "project_name", "report.name", "trainer.name"),
    "report.trackers": ("wandb", "tensorboard", "report_to", "logger", "loggers", "tracker"),
    "resume": ("resume_mode", "resume_from_checkpoint", "resume_from_path"),
    "checkpoint.save_every_steps": ("save_steps", "save_freq", "save_interval", "every", "interval", "freq"),
    "checkpoint.max_ckpt_to_keep": ("save_total_limit", "max_actor_ckpt_to_keep", "keep_last", "keep"),
    "eval.every_steps": ("eval_steps", "test_freq", "eval_interval", "interval", "every", "freq"),
    "eval.before_training": ("val_before_train", "eval_on_start"),
    "algorithm.advantage": ("adv_estimator", "advantage_estimator", "algo", "scale_rewards"),
    "algorithm.loss": ("loss_type", "policy_loss", "loss_mode"),
    "algorithm.kl_coeff": ("kl_coef", "beta", "kl_loss_coef", "init_kl_coef", "kl_beta"),
    "critic.kl_coeff": ("kl_coef",),
    "algorithm.entropy_coeff": ("entropy_coef", "entropy_loss_coef", "ent_coef"),
    "algorithm.clip_ratio_low": ("epsilon", "clip_ratio", "eps_clip", "clip_range", "cliprange"),
    "algorithm.clip_ratio_high": ("epsilon_high", "eps_clip_high"),
    "algorithm.mini_batches": ("num_minibatches", "ppo_mini_batch_size", "mini_batch_size"),
    "algorithm.ppo_epochs": ("num_iterations", "num_ppo_epochs", "inner_epochs"),
    "algorithm.filter_groups": ("dynamic_sampling",),
    "async_training.staleness_threshold": ("max_staleness", "async_level", "max_off_policy_steps", "staleness"),
    "reward.function": (
        "fn",
        "reward_fn",
        "reward_funcs",
        "reward_function",
        "custom_reward_function",
        "rm_type",
        "reward.path",
        "custom_reward_function.path",
    ),
    "rollout.engine_options": ("enforce_eager", "memory_utilization", "swap_space", "kv_cache_dtype", "engine_kwargs"),
}
"""The names of other programs for our keys, also with something before them (``actor_lr``), or with their section."""
_TAG = re.compile(r"<.*>|str|int|float|bool|(literal|tuple|list|dict|function-\w+|constrained-\w+)(\[.*)?")
"""The parts of a place that name a type: the member of a union."""
_WORDS = {"valid tuple": "list", "valid dictionary": "mapping, like {name: value}", "Tuple": "List"}


def explain(errors: Sequence[Any], *, root: type[BaseModel]) -> list[str]:
    """Return one line for each mistake in pydantic's ``errors``: the key, the mistake and the value, or a likely key.

    ``root`` is the pydantic model of the whole configuration.
    """
    mistakes: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for error in errors:
        parts, given = [str(part) for part in error["loc"]], error["input"]
        beside = [other for other in errors if other is not error and other["loc"][: len(parts)] == error["loc"]]
        if error["type"] == "too_short" and beside:  # it counts only the items without a mistake
            continue
        key = ".".join(part for place, part in enumerate(parts) if place == 0 or not _TAG.fullmatch(part))
        key = key or "the configuration"
        mistakes.setdefault(key, []).append(_mistake(error, key, root))
        is_value = error["type"] not in ("missing", "model_type", "extra_forbidden")
        if is_value and isinstance(given, str | int | float) and len(str(given)) <= _MAX_SHOWN:
            shown[key] = f"; it is {given!r}"
    return [f"{key}: {', or '.join(dict.fromkeys(found))}{shown.get(key, '')}" for key, found in mistakes.items()]


def _mistake(error: Any, key: str, root: type[BaseModel]) -> str:
    if error["type"] == "model_type":
        keys = keys_in(key, root=root)
        return "it is a section, not a value" + (f"; did you mean {' or '.join(keys[:3])}?" if keys else "")
    if error["type"] == "extra_forbidden":
        leaves = islice(_leaves(key, error["input"]), _MAX_LEAVES) if isinstance(error["input"], dict) else [key]
        likely = {leaf: _likely_keys(leaf, root=root) for leaf in leaves if leaf not in RENAMED}
        likely |= {key: [RENAMED[key]]} if key in RENAMED else {}
        hints = [
            f"{'' if leaf == key else f'for {leaf} '}did you mean {' or '.join(keys)}?"
            for leaf, keys in (likely if any(likely.values()) else {key: _likely_keys(key, root=root)}).items()
            if keys
        ]
        return ", ".join(["there is no such key", *hints])
    message = str(error["msg"]).removeprefix("Value error, ")
    for word, ours in _WORDS.items():
        message = message.replace(word, ours)
    is_item = isinstance(error["input"], str) and error["type"] in ("list_type", "tuple_type")
    return f"{message}, like [{error['input']}]" if is_item else message


def _leaves(key: str, tree: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of the values in ``tree``, the section ``key``."""
    for name, value in tree.items():
        yield from _leaves(f"{key}.{name}", value) if isinstance(value, dict) else [f"{key}.{name}"]


def keys_in(section: str, *, root: type[BaseModel]) -> list[str]:
    """Return the required keys of ``section``; all its keys if none is required; nothing if it is not a section."""
    kind = root.model_fields[section].annotation if section in root.model_fields else None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    required = [key for key, field in kind.model_fields.items() if field.is_required()]
    return [f"{section}.{key}" for key in required or kind.model_fields]


def _likely_keys(key: str, *, root: type[BaseModel]) -> list[str]:
    """Return the keys that the user may have meant.

    These are what other programs call so with its section; or the keys of other sections with the same last part, with
    those of the optional critic at the end. If there are none: the keys that other programs call so; or those with a
    similar last part, first in the same section; or the options of an engine.
    """
    keys = all_keys(root)
    whole = key.lower().replace("-", "_")
    section, _, name = whole.rpartition(".")
    moved = [ours for ours, theirs in SAME_AS.items() if section and whole in theirs]
    moved = moved or [candidate for candidate in keys if candidate.rpartition(".")[2] == name]
    moved = moved or [
        f"{ours}.{name}" if ours.endswith("_options") else ours
        for ours, theirs in SAME_AS.items()
        if any(one in (name, whole) or (len(one) > 4 and name.endswith(f"_{one}")) for one in theirs)
    ]
    if moved:
        own = [one for one in {f"{section}.{candidate.rpartition('.')[2]}": 0 for candidate in moved} if one in keys]
        return own or sorted(moved, key=lambda candidate: candidate.startswith("critic."))
    if key.count(".") > 1:  # a key of an entry in a list
        return []
    elsewhere = keys if len(name) > 4 else []  # a short name is similar to many: type, mode, eps
    for candidates, cutoff in (([one for one in keys if one.rpartition(".")[0] == section], 0.6), (elsewhere, 0.7)):
        last = difflib.get_close_matches(name, {one.rpartition(".")[2] for one in candidates}, n=1, cutoff=cutoff)
        if last:
            return [one for one in candidates if one.rpartition(".")[2] == last[0]]
    return [f"{section}.engine_options.{name}, for an engine of a plugin"] if section in ("rollout", "train") else []


def all_keys(root: type[BaseModel]) -> list[str]:
    """Return every key, such as ``train`` and ``train.steps``. A section comes before its keys."""
    keys = []
    for name, field in root.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(f"{name}.{key}" for key in field.annotation.model_fields)
    return keys
