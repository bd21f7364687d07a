"""Translate the configuration of a run into the settings of its engines, and into its ledger. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hwrl.hub import model_directory
from hwrl.interfaces import EngineSettings, RolloutSettings, Sampling
from hwrl.rollout import PromptLedger, has_variance
from hwrl.run.config import Config

if TYPE_CHECKING:
    import torch


def engine_settings(config: Config) -> EngineSettings:
    """Return the settings of the train engine."""
    return EngineSettings(
        model_directory=config.model.directory,
        total_steps=config.train.steps * config.algorithm.ppo_epochs * config.algorithm.mini_batches,
        micro_batch_tokens=config.train.micro_batch_tokens,
        temperature=config.rollout.temperature,
        dtype=compute_dtype(config),
        param_offload=config.train.param_offload,
        optimizer_offload=config.train.optimizer_offload,
        activation_checkpointing=config.train.activation_checkpointing,
        compile=config.train.compile,
        fused_kernels=config.train.fused_kernels,
        shard_ranks=config.train.shard_ranks,
        host_step=config.train.host_step,
        lora=config.model.lora,
        seed=config.seed,
        context_parallel=config.train.context_parallel,
        max_length=config.max_model_len,
        **config.optimizer.model_dump(exclude={"max_skipped_in_a_row"}),  # the trainer has it
    )


def critic_settings(config: Config) -> EngineSettings:
    """Return the settings of the critic's engine: those of the policy, except for the model and the learning rate."""
    return replace(
        engine_settings(config),
        model_directory=model_directory(config.critic.path or config.model.path),
        learning_rate=config.critic.learning_rate,
    )


def reference_settings(config: Config) -> EngineSettings:
    """Return the settings of the reference model: those of the policy, without its adapter."""
    model = model_directory(config.algorithm.reference or config.model.path)
    return replace(engine_settings(config), model_directory=model, lora=None)


def rollout_settings(config: Config, *, eos_ids: Sequence[int] = (), seed: int = 0) -> RolloutSettings:
    """Return the settings of a replica's rollout engine."""
    return RolloutSettings(
        model_directory=config.model.directory,
        dtype=compute_dtype(config),
        eos_ids=eos_ids,
        max_running=config.rollout.max_running,
        max_length=config.max_model_len,
        seed=seed,
        sampling=rollout_sampling(config),
        lora=config.model.lora,
        free_cache_engine=config.rollout.free_cache_engine,
        tensor_parallel=config.rollout.tensor_parallel,
    )


def rollout_sampling(config: Config) -> Sampling:
    """Return the sampling parameters for training prompts."""
    settings = config.rollout
    return Sampling(
        settings.max_new_tokens,
        settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
    )


def tokenizer_with(config: Config, template: str | None) -> Any:
    """Return the model's tokenizer, set to the run's chat template and its options. All parts of a replica use it.

    ``template`` is the content of ``data.chat_template_file``, None if there is no such file. Raises ConfigError if one
    of ``data.chat_template_kwargs`` has no effect. Imports torch.
    """
    from hwrl.models import load_tokenizer, use_chat_template

    tokenizer, data = load_tokenizer(config.model.directory), config.data
    chosen = data.chat_template if template is None else template
    use_chat_template(tokenizer, chosen, options=data.chat_template_kwargs)
    return tokenizer


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of the forward and backward passes, of rollout, and of the exported model."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def make_ledger(config: Config, *, further_steps: int = 0) -> PromptLedger:
    """Return the empty prompt ledger of a run, with prompts for ``further_steps`` after its last one."""
    return PromptLedger(
        groups_per_version=config.groups_per_version,
        max_staleness=config.async_training.staleness_threshold,
        total_groups=(config.train.steps + further_steps) * config.train.batch_groups,
        lead_groups=config.lead_groups,
        group_timeout_s=config.rollout.group_timeout_s,
        max_attempts=config.rollout.max_attempts,
        max_skipped_in_a_row=config.rollout.max_skipped_in_a_row if config.rollout.on_failure == "skip" else 0,
        teaches=has_variance if config.algorithm.filter_groups else None,
        max_filtered_in_a_row=config.algorithm.max_filtered_in_a_row,
    )
