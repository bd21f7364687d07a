"""Build the parts of a run from its configuration, in the process that uses them. No part starts to work here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import transformers.modeling_utils  # noqa: F401 - every model imports it; imported here, it counts as a large import

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Group, connect_store
from hwrl.discovery import get_backend
from hwrl.errors import ConfigError
from hwrl.hub import model_directory
from hwrl.interfaces import RolloutEngine, TokenLoss, TrainEngine
from hwrl.models import load_generation_config, load_tokenizer, vocabulary_size
from hwrl.rollout import (
    HERMES,
    AdapterUpdater,
    ChatTokens,
    DataKeys,
    EmbeddedEngine,
    EngineModels,
    LedgerClient,
    LoopSettings,
    ModelLink,
    NoRewards,
    Prompts,
    PromptSet,
    PromptStream,
    ReceivedModels,
    RetryingReceiver,
    RewardWorkers,
    Rollouter,
    SampleGenerator,
    WeightUpdater,
    WorkflowGenerator,
    WorkflowSettings,
    decode_text,
    load_workflow,
    parse_tool_calls,
)
from hwrl.run.config import EMBEDDED, FSDP, Config, DataSetConfig
from hwrl.run.fit import check_replica
from hwrl.run.identity import ADVANTAGE, CURRICULUM, EVAL, LOSS, REWARD, TEMPLATE, TRAIN, WORKFLOW, RunInputs, data_key
from hwrl.run.inputs import load_rollout_engine, load_train_engine
from hwrl.run.settings import (
    critic_settings,
    engine_settings,
    reference_settings,
    rollout_sampling,
    rollout_settings,
    tokenizer_with,
)
from hwrl.train import (
    Algorithm,
    CriticEngine,
    Engines,
    FsdpEngine,
    LossName,
    Objective,
    Overlong,
    PolicyLoss,
    ReferenceModel,
    Rejection,
    UserLoss,
    ValueLoss,
)
from hwrl.user_code import load_function
from hwrl.weights import POLICY, POLICY_BASE, WeightReceiver

_LOCK_WAIT_S = 150.0
"""How long a trainer waits for the checkpoints' lock. The trainer before it may be on a host that was cut off. Ray's
process there ends it when it meets the cluster again, or a minute after it lost it; a file server takes up to 90 s more
to free the locks of a client that it cannot reach."""


# -- a replica ------------------------------------------------------------------------------------------------------


def build_rollouter(
    config: Config,
    *,
    inputs: RunInputs,
    replica: str,
    seed: int,
    store_address: str,
    ledger: LedgerClient,
    tokenizer: Any,
    check_prompts: bool = False,
) -> Rollouter:
    """Return a rollouter that waits for its first weights. It gets them from the trainer and reads no weight files.

    With ``check_prompts`` all training prompts are tokenised now; DataError for a bad one.
    """
    settings = LoopSettings(
        sampling=rollout_sampling(config),
        group_size=config.rollout.n,
        eval_temperature=config.eval.temperature,
        eval_samples=config.eval.n,
        eval_share=config.eval.share,
        skips_failures=config.rollout.on_failure == "skip",
        partial_rollout=config.async_training.partial_rollout,
        sleep_level=config.rollout.sleep_level if config.rollout.free_cache_engine else None,
        trace_every=config.report.trace_every,
        replica=replica,
    )
    with ExitStack() as cleanup:
        rewards = NoRewards() if config.reward.function is None else _start_rewards(config, inputs, tokenizer)
        cleanup.callback(rewards.close)
        engine = _build_rollout_engine(config, tokenizer, seed=seed)
        cleanup.callback(engine.close)
        prompts = training_prompts(config, inputs, tokenizer, check=check_prompts)
        rewards.wait_until_ready()
        weights = build_updater(config, engine, store_address=store_address, replica=replica)
        rollouter = Rollouter(
            engine,
            ledger=ledger,
            prompts=prompts,
            rewards=rewards,
            weights=weights,
            settings=settings,
            generator=_build_generator(config, inputs, engine, tokenizer),
        )
        cleanup.pop_all()
    return rollouter


def _build_generator(
    config: Config, inputs: RunInputs, engine: RolloutEngine, tokenizer: Any
) -> SampleGenerator | None:
    """Return the generator for ``rollout.workflow``; None without a workflow, for one response in one turn."""
    rollout = config.rollout
    if rollout.workflow is None:
        return None
    source, parser = inputs.source(WORKFLOW), rollout.tool_parser
    workflow = load_workflow(rollout.workflow, rollout.workflow_options, tokenizer=tokenizer, source=source)
    settings = WorkflowSettings(
        group_size=rollout.n,
        max_samples=rollout.max_trajectories or rollout.max_running,
        max_length=config.max_model_len,
        vocabulary=vocabulary_size(config.model.directory),
        timeout_s=rollout.workflow_timeout_s,
        attempts=rollout.workflow_attempts,
        end_ids=_eos_ids(config.model.directory, tokenizer),
        parse_tools=parse_tool_calls if parser == HERMES else engine.tool_parser(parser, tokenizer=tokenizer),
    )
    return WorkflowGenerator(engine, workflow, tokenizer=tokenizer, settings=settings)


def _start_rewards(config: Config, inputs: RunInputs, tokenizer: Any) -> RewardWorkers:
    """Return reward workers. They load the reward function in the background."""
    assert config.reward.function is not None, "the caller has checked it"
    return RewardWorkers(
        config.reward.function,
        source=inputs.source(REWARD),
        decode=functools.partial(decode_text, tokenizer, special=False),
        attempts=config.reward.attempts,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        batch=config.reward.batch,
        concurrency=config.reward.concurrency,
    )


def build_updater(config: Config, engine: RolloutEngine, *, store_address: str, replica: str) -> WeightUpdater:
    """Return the updater that loads received weights into ``engine``: whole models, or a base and its adapters."""
    if config.model.lora is None:
        return build_model_link(config, engine, name=POLICY, store_address=store_address, replica=replica)

    def connect() -> RetryingReceiver:
        receiver = WeightReceiver(connect_store(store_address), name=POLICY, replica=replica)
        return RetryingReceiver(receiver, timeout_s=transfer_timeout_s(config))

    connect_base = functools.partial(
        build_model_link, config, engine, name=POLICY_BASE, store_address=store_address, replica=replica
    )
    return AdapterUpdater(engine, connect=connect, connect_base=connect_base)


def build_model_link(
    config: Config, engine: RolloutEngine, *, name: str, store_address: str, replica: str, newest: bool = True
) -> ModelLink:
    """Return a link that loads whole models into ``engine``.

    The engine receives the tensors itself if it is able to. With ``weights.keep_old_version`` it is not asked to: this
    process then receives them, and keeps the old version until the new one is complete.
    """
    store, once = connect_store(store_address), name == POLICY_BASE
    if config.weights.keep_old_version or not engine.receivers:
        receiver = WeightReceiver(store, name=name, replica=replica, newest=newest)
        return ReceivedModels(engine, receiver, timeout_s=transfer_timeout_s(config), as_base=once)
    return EngineModels(
        engine,
        store,
        name=name,
        replica=replica,
        timeout_s=transfer_timeout_s(config),
        newest=newest,
        once=once,
    )


def transfer_timeout_s(config: Config) -> float:
    """Return the sender's time limit for replicas. Without partial rollout they first finish their responses."""
    drain_s = 0.0 if config.async_training.partial_rollout else config.rollout.group_timeout_s
    return config.weights.timeout_s + drain_s


def _build_rollout_engine(config: Config, tokenizer: Any, *, seed: int) -> RolloutEngine:
    settings = rollout_settings(config, eos_ids=_eos_ids(config.model.directory, tokenizer), seed=seed)
    check_replica(config, get_backend())
    if config.rollout.engine == EMBEDDED:
        return EmbeddedEngine.from_settings(settings, backend=get_backend())
    engine: RolloutEngine = load_rollout_engine(config)(
        settings=settings, options=config.rollout.engine_options, backend=get_backend()
    )
    return engine


def _eos_ids(model_directory: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response, from the model's generation settings and the tokenizer."""
    configured = load_generation_config(model_directory).eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if not ids:
        raise ConfigError(
            "the model has no end-of-sequence token",
            why="neither its tokenizer nor its generation settings name one",
            fix="set eos_token_id in the model directory's generation_config.json",
        )
    vocabulary = vocabulary_size(model_directory)
    if max(ids) >= vocabulary:
        raise ConfigError(
            "the model can never generate its end-of-sequence token",
            why=f"token {max(ids)} ends a response, and the model has {vocabulary} tokens (vocab_size in config.json)",
            fix="set eos_token_id in the model directory's generation_config.json and tokenizer files",
        )
    return sorted(ids)


# -- prompts ---------------------------------------------------------------------------------------------------------


def run_tokenizer(config: Config, inputs: RunInputs) -> Any:
    """Return :func:`tokenizer_with` the content of the template's file, checked against the driver's hash."""
    return tokenizer_with(config, None if config.data.chat_template_file is None else inputs.read(TEMPLATE).decode())


def training_prompts(config: Config, inputs: RunInputs, tokenizer: Any, *, check: bool = False) -> PromptStream:
    """Return the stream of prompts to train on. With ``check``, tokenise all now, and raise DataError for a bad one."""
    loaded = [_load(config, inputs, tokenizer, key=TRAIN, data_set=one, check=check) for one in config.data.train_sets]
    sets = [
        PromptSet(one.name, prompts, one.weight) for one, prompts in zip(config.data.train_sets, loaded, strict=True)
    ]
    target = config.data.curriculum
    curriculum = None if target is None else load_function(target, key=CURRICULUM, source=inputs.source(CURRICULUM))
    return PromptStream(sets, seed=config.seed, curriculum=curriculum)


def evaluation_prompts(
    config: Config, inputs: RunInputs, tokenizer: Any, *, check: bool = False
) -> list[tuple[Prompts, int]]:
    """Return the evaluation prompts of all sets, one set after another, each as a set and a row of it."""
    sets = [_load(config, inputs, tokenizer, key=EVAL, data_set=one, check=check) for one in config.data.eval_sets]
    return [(one, row) for one in sets for row in range(len(one))[: config.eval.prompts]]


def _load(
    config: Config, inputs: RunInputs, tokenizer: Any, *, key: str, data_set: DataSetConfig, check: bool
) -> Prompts:
    chat = ChatTokens(tokenizer, end_ids=(), max_length=config.data.max_prompt_tokens)
    prompts = Prompts(
        data_set.path,
        content=inputs.read_data(data_key(key, data_set.name)),
        encode=chat.encode_prompt,
        max_prompt_tokens=config.data.max_prompt_tokens,
        vocabulary=vocabulary_size(config.model.directory),
        keys=DataKeys(*config.data.keys_of(data_set)),
        source=data_set.name,
    )
    if check:
        for _ in prompts:
            pass
    return prompts


# -- a trainer rank -------------------------------------------------------------------------------------------------


def build_algorithm(config: Config, inputs: RunInputs) -> Algorithm:
    """Return the advantages and the loss of the run. Raises DataError if a user's function cannot be loaded."""
    settings = config.algorithm
    lower, upper = settings.rejection_band
    objective = Objective(
        _policy_loss(config, inputs),
        rejection=None if settings.rollout_rs is None else Rejection(settings.rollout_rs, lower, upper),
        kl_coeff=settings.kl_coeff,
        kl_estimator=settings.kl_estimator,
        entropy_coeff=settings.entropy_coeff,
    )
    longest = config.rollout.max_new_tokens
    overlong = Overlong(
        settings.mask_truncated, settings.overlong_buffer_tokens, max_tokens=longest, penalty=settings.overlong_penalty
    )
    return Algorithm(
        objective,
        _users_function(settings.advantage, ADVANTAGE, inputs) or settings.advantage,
        settings.ppo_epochs,
        settings.mini_batches,
        aggregation=settings.loss_agg_mode,
        loss_constant=settings.loss_scale_factor or longest,
        overlong=overlong if overlong.masks_truncated or overlong.buffer_tokens else None,
        critic_warmup=config.critic.warmup_steps,
    )


def _policy_loss(config: Config, inputs: RunInputs) -> TokenLoss:
    settings = config.algorithm
    function = _users_function(settings.loss, LOSS, inputs)
    if function is not None:
        return UserLoss.of(function)
    return PolicyLoss(
        cast(LossName, settings.loss),
        clip_low=settings.clip_ratio_low,
        clip_high=settings.clip_ratio_high,
        is_threshold=settings.rollout_is_threshold,
        is_level=settings.rollout_is,
    )


def _users_function(target: str, key: str, inputs: RunInputs) -> Callable[..., Any] | None:
    """Return the user's function at the import path ``target``; None if ``target`` is a built-in name."""
    return load_function(target, key=key, source=inputs.source(key)) if ":" in target else None


def build_engines(config: Config, *, group: Group | None, algorithm: Algorithm) -> Engines:
    """Return the policy's engine with the model's weights, and the critic if the run has one."""
    critic = None
    if config.algorithm.has_critic:  # first: the policy uses the remaining memory for unsharded weights
        critic = _build_critic(config, group)
    needs_reference = algorithm.loss.needs_reference or (critic is not None and critic.needs_reference)
    return Engines(_build_policy(config, group, needs_reference=needs_reference), critic)


def _build_critic(config: Config, group: Group | None) -> CriticEngine:
    settings = config.critic
    _require_vocabulary(config, "critic.path")
    return CriticEngine(
        critic_settings(config),
        backend=get_backend(),
        group=group,
        gamma=settings.gamma,
        lam=settings.lam,
        loss=ValueLoss(settings.cliprange_value),
        kl_coeff=settings.kl_coeff,
    )


def _require_vocabulary(config: Config, key: str) -> None:
    """Raise ConfigError if ``key`` names a model that does not have the policy's tokens, under the same numbers."""
    path, policy = config.models.get(key), config.model.directory
    if path is None:
        return
    model = model_directory(path)
    why = ""
    if vocabulary_size(model) < vocabulary_size(policy):
        why = "its vocabulary is smaller than the policy's, so some tokens of the policy are unknown to it"
    elif any(model.glob("tokenizer*")) and not _tokens(policy).items() <= _tokens(model).items():
        why = "its tokenizer has other tokens, so the policy's numbers would mean other texts"
    if why:
        fix = f"set {key} to a model with the same tokenizer, or to null"
        raise ConfigError(f"the model in {path} cannot be used beside {config.model.path}", why=why, fix=fix)


def _tokens(model: Path) -> dict[str, int]:
    return dict(load_tokenizer(model).get_vocab())


def _build_policy(config: Config, group: Group | None, *, needs_reference: bool) -> TrainEngine:
    settings = engine_settings(config)
    if config.train.engine == FSDP:
        reference = None
        if needs_reference and (settings.lora is None or config.algorithm.reference is not None):  # else it is the base
            _require_vocabulary(config, "algorithm.reference")
            reference = ReferenceModel(reference_settings(config), backend=get_backend(), group=group)
        return FsdpEngine(settings, backend=get_backend(), group=group, reference=reference)
    engine: TrainEngine = load_train_engine(config)(
        settings=settings, options=config.train.engine_options, backend=get_backend(), group=group
    )
    return engine


def build_checkpoints(config: Config, *, group: Group | None) -> CheckpointManager:
    """Return the checkpoint manager of the run directory. Waits for the lock of a predecessor that still ends."""
    return CheckpointManager(
        config.dir / "checkpoints",
        max_ckpt_to_keep=config.checkpoint.max_ckpt_to_keep,
        async_save=config.checkpoint.async_save,
        staging=config.checkpoint.staging,
        group=group,
        lock_wait_s=_LOCK_WAIT_S,
    )
