"""Make the parts of a run from its configuration, in the process that will use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Comm, Group, PrefixStore, connect_store
from hwrl.discovery import get_backend
from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.interfaces import EngineSettings, RolloutEngine, RolloutSettings, Sampling, TrainEngine
from hwrl.models import (
    encode_prompt,
    load_generation_config,
    load_tokenizer,
    vocabulary_size,
)
from hwrl.rollout.data import Prompt, PromptStream, check_vocabulary, load_prompts
from hwrl.rollout.embedded import EmbeddedEngine
from hwrl.rollout.leases import LedgerClient
from hwrl.rollout.reward import load_reward
from hwrl.rollout.reward_workers import RewardWorkers
from hwrl.rollout.rollouter import LoopSettings, Rollouter
from hwrl.rollout.weight_updater import INCARNATION, AdapterUpdater, ModelUpdater, RetryingReceiver, WeightUpdater
from hwrl.run.config import EMBEDDED, FSDP, Config
from hwrl.run.identity import EVAL, TRAIN, RunInputs
from hwrl.run.inputs import load_rollout_engine, load_train_engine
from hwrl.run.summary import MODEL, SENT
from hwrl.train.fsdp import FsdpEngine
from hwrl.train.losses import PolicyLoss
from hwrl.train.rng import rng_state, set_rng_state
from hwrl.train.trainer import Algorithm, AsyncTrainer
from hwrl.weights import (
    POLICY,
    POLICY_BASE,
    PolicySender,
    SharedWeights,
    SyncReport,
    TransportName,
    WeightReceiver,
    WeightSender,
)


def prepare_process(*, threads: int, device: int = 0) -> None:
    """Make visible device ``device`` of the chosen backend the current one; compute with ``threads`` host threads."""
    torch.set_num_threads(threads)
    get_backend().set_device(device)


def evaluation_prompts(config: Config, inputs: RunInputs) -> list[Prompt]:
    """Return the prompts to evaluate on: none if the configuration names no evaluation data."""
    if config.data.eval is None:
        return []
    return _prompts(config, inputs, key=EVAL)[: config.eval.prompts]


def build_rollouter(
    config: Config, *, inputs: RunInputs, replica: str, seed: int, store_address: str, ledger: LedgerClient
) -> Rollouter:
    """Return a rollouter that waits for its first weights; it never reads the training model's weights."""
    tokenizer = load_tokenizer(config.model.path)
    engine = _build_rollout_engine(config, tokenizer, seed=seed)
    return Rollouter(
        engine,
        ledger=ledger,
        prompts=PromptStream(_prompts(config, inputs, key=TRAIN), seed=config.seed),
        rewards=RewardWorkers(
            load_reward(config.reward.function),
            decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
            attempts=config.reward.attempts,
            threads=config.reward.threads,
            timeout_s=config.reward.timeout_s,
        ),
        weights=_build_updater(config, engine, store_address=store_address, replica=replica),
        settings=LoopSettings(
            sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature),
            group_size=config.rollout.n,
            partial_rollout=config.async_training.partial_rollout,
            sleep_level=config.rollout.sleep_level if config.rollout.free_cache_engine else None,
        ),
    )


def _build_updater(config: Config, engine: RolloutEngine, *, store_address: str, replica: str) -> WeightUpdater:
    store = connect_store(store_address)

    def connect(name: str, *, newest: bool = True) -> RetryingReceiver:
        receiver = WeightReceiver(store, name=name, replica=replica, newest=newest)
        return RetryingReceiver(receiver, timeout_s=_transfer_timeout_s(config))

    return ModelUpdater(engine, connect(POLICY)) if config.model.lora is None else AdapterUpdater(engine, connect)


def _transfer_timeout_s(config: Config) -> float:
    """Return how long the sender waits for replicas: without partial rollout they finish their responses first."""
    drain_s = 0.0 if config.async_training.partial_rollout else config.rollout.group_timeout_s
    return config.weights.timeout_s + drain_s


def _prompts(config: Config, inputs: RunInputs, *, key: str) -> list[Prompt]:
    tokenizer, path = load_tokenizer(config.model.path), inputs.files[key].path
    prompts = load_prompts(
        path,
        content=inputs.read(key),
        encode=lambda prompt: encode_prompt(tokenizer, prompt),
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
    check_vocabulary(prompts, path=path, vocabulary=vocabulary_size(config.model.path))
    return prompts


def _build_rollout_engine(config: Config, tokenizer: Any, *, seed: int) -> RolloutEngine:
    settings = RolloutSettings(
        model_directory=config.model.path,
        dtype=_dtype(config),
        eos_ids=_end_ids(config.model.path, tokenizer),
        max_running=config.rollout.max_running,
        max_length=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        seed=seed,
        temperature=config.rollout.temperature,
        lora=config.model.lora,
        may_sleep=config.rollout.free_cache_engine,
        tensor_parallel=config.rollout.tensor_parallel,
    )
    if config.rollout.engine == EMBEDDED:
        return EmbeddedEngine.from_settings(settings, backend=get_backend())
    engine: RolloutEngine = load_rollout_engine(config)(
        settings=settings, options=config.rollout.engine_options, backend=get_backend()
    )
    return engine


def _end_ids(model_directory: Path, tokenizer: Any) -> list[int]:
    """Return the ids that end a response: those of the model's generation settings and the tokenizer's."""
    configured = load_generation_config(model_directory).eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if not ids:
        raise ConfigError(
            "the model has no end-of-sequence token",
            why="neither its tokenizer nor its generation settings name one",
            fix="set eos_token_id in the model directory's generation_config.json",
        )
    return sorted(ids)


class TrainerParts:
    """One rank's trainer with its engine, weight sender and checkpoints, wired together."""

    def __init__(
        self,
        config: Config,
        *,
        inputs: RunInputs,
        rank: int,
        store_address: str,
        incarnation: int,
        transport: TransportName,
    ) -> None:
        self._config, self._inputs, self._rank = config, inputs, rank
        backend = get_backend()
        store = connect_store(store_address)
        ranks = config.train.ranks
        self._group: Group | None = None
        if ranks > 1:
            place = PrefixStore(f"train/{incarnation}", store)
            self._group = Comm(backend).init_default(store=place, rank=rank, size=ranks)
        self._engine = _build_train_engine(config, group=self._group)
        self._sender = (
            _build_sender(config, store, transport, base=self._engine.base, incarnation=incarnation)
            if rank == 0
            else None
        )
        self._unreported: dict[str, float] = {}
        self._trainer = AsyncTrainer(
            self._engine,
            algorithm=_algorithm(config),
            publish=self._send,
            max_staleness=config.async_training.staleness_threshold,
            trigger_parameter_sync_step=config.async_training.trigger_parameter_sync_step,
            incarnation=incarnation,
        )
        self._checkpoints = CheckpointManager(
            config.dir / "checkpoints",
            max_ckpt_to_keep=config.checkpoint.max_ckpt_to_keep,
            async_save=config.checkpoint.async_save,
            staging=config.checkpoint.staging,
            group=self._group,
        )

    def resume(self) -> dict[str, Any] | None:
        """Load the newest complete checkpoint; return its ``extra``, what was skipped and what has changed, or None."""
        with self._engine.on_device(optimizer=True):
            state = self._engine.state_dict()
            resumed = self._checkpoints.resume(state)
            if resumed is None:
                return None
            changed = self._inputs.compare_with_checkpoint(resumed.extra)
            self._check_base(resumed.extra["adapter"])
            self._engine.load_state_dict(state)
        self._trainer.load_state_dict(resumed.extra["trainer"])
        if self._rank < len(resumed.rank_extras):  # a rank that is new keeps the state that it started with
            set_rng_state(resumed.rank_extras[self._rank]["rng"], get_backend())
        return {
            **resumed.extra,
            "step": resumed.step,
            "skipped": [(str(one.path), one.reason) for one in resumed.skipped],
            "changed": changed,
        }

    def _check_base(self, saved: dict[str, Any] | None) -> None:
        before = None if saved is None else saved["base"]
        if before != self._engine.base:
            raise ConfigError(
                f"the checkpoint's adapter does not belong to the model in {self._config.model.path}",
                why="its base was another: the configuration or the weights there have changed",
                fix="put the old model back, or begin a new run in another dir=…",
            )

    def _adapter(self) -> dict[str, Any] | None:
        """Return what identifies the adapter in a checkpoint; None if the whole model is trained."""
        lora = self._config.model.lora
        return None if lora is None else {"base": self._engine.base, "config": lora.peft_config()}

    def publish(self) -> None:
        """Publish the current weights, out of turn; the next step reports what that sent."""
        figures = self._trainer.publish()
        self._unreported = {name: self._unreported.get(name, 0.0) + figures[name] for name in SENT if name in figures}

    def joiners(self) -> tuple[str, ...]:
        """Return the replicas that have joined and lack the newest weights."""
        return () if self._sender is None else self._sender.joiners()

    def step(self, groups: Any) -> dict[str, float]:
        """Train one step."""
        figures = self._trainer.step(groups)
        unreported, self._unreported = self._unreported, {}
        return {**figures, **{name: figures.get(name, 0.0) + value for name, value in unreported.items()}}

    def save(self, ledger: dict[str, Any]) -> dict[str, float]:
        """Save this moment; return what that cost."""
        with self._trainer.saving(), self._engine.saved_state() as (state, offloader):
            report = self._checkpoints.save(
                self._trainer.steps_done,
                state,
                offloader=offloader,
                extra={
                    "trainer": self._trainer.state_dict(),
                    "ledger": ledger,
                    "inputs": self._inputs.digests(),
                    "adapter": self._adapter(),
                },
                rank_extra={"rng": rng_state(get_backend())},
                weight_version=self._trainer.version,
            )
        return {"checkpoint/blocked_s": report.blocked_s, "checkpoint/waited_s": report.waited_s}

    def export(self) -> None:
        """Write the trained model to the run directory, for transformers."""
        directory = self._config.dir / MODEL
        try:
            directory.mkdir(exist_ok=True)  # transformers does nothing, and raises nothing, if a file has that name
            with self._engine.on_device(optimizer=False):
                self._engine.export(directory)
        except (OSError, SafetensorError) as exc:
            raise RunDirectoryError(
                f"the trained model cannot be written to {directory}",
                why=str(exc),
                fix="give the directory what the reason names; resume=true then writes the model",
            ) from exc

    def close(self) -> None:
        """End the transfer and the checkpoints; raises if a save in the background failed."""
        try:
            self._checkpoints.close()
        finally:
            if self._sender is not None:
                self._sender.close()
            self._engine.close()
            if self._group is not None:
                self._group.close()

    def _send(self, version: int, engine: TrainEngine) -> dict[str, float]:
        with SharedWeights(engine, self._group) as weights:
            if self._sender is None:
                weights.follow()
                return {}
            report = self._sender.send(version, model=weights.model, adapter=weights.adapter)
        return _sync_figures(report)


def _sync_figures(report: SyncReport) -> dict[str, float]:
    """Return what a publication cost; the base's stages count with the version's."""
    parts = [report.policy] if report.base is None else [report.policy, report.base]
    stages = dict.fromkeys(stage for part in parts for stage in part.seconds)
    figures = {
        "sync/nbytes": float(sum(part.nbytes for part in parts)),
        "sync/receivers": float(report.policy.receivers),
        "sync/quarantined": float(sum(len(part.excluded) for part in parts)),
        **{f"sync/{stage}_s": sum(part.seconds.get(stage, 0.0) for part in parts) for stage in stages},
    }
    if report.plan.what == "full":
        return figures
    sent = (report.plan.sends_base, report.base_nbytes, report.adapter_nbytes)
    return {**figures, **dict(zip(SENT, map(float, sent), strict=True))}


def _build_train_engine(config: Config, *, group: Group | None) -> TrainEngine:
    settings = EngineSettings(
        model_directory=config.model.path,
        total_steps=config.train.steps * config.algorithm.ppo_epochs * config.algorithm.mini_batches,
        micro_batch_tokens=config.train.micro_batch_tokens,
        temperature=config.rollout.temperature,
        dtype=_dtype(config),
        param_offload=config.train.param_offload,
        optimizer_offload=config.train.optimizer_offload,
        activation_checkpointing=config.train.activation_checkpointing,
        lora=config.model.lora,
        seed=config.seed,
        **config.optimizer.model_dump(),
    )
    if config.train.engine == FSDP:
        return FsdpEngine(settings, backend=get_backend(), group=group)
    engine: TrainEngine = load_train_engine(config)(
        settings=settings, options=config.train.engine_options, backend=get_backend(), group=group
    )
    return engine


def _build_sender(
    config: Config, store: Any, transport: TransportName, *, base: int | None, incarnation: int
) -> PolicySender:
    slab_mib = config.weights.update_weights_bucket_megabytes

    def connect(name: str) -> WeightSender:
        return WeightSender(
            store,
            name=name,
            transport=transport,
            slab_nbytes=None if slab_mib is None else slab_mib << 20,
            versions=1 if name == POLICY_BASE else 3,
            timeout_s=_transfer_timeout_s(config),
        )

    always_base = config.weights.send_base == "always"
    return PolicySender(connect, base=base, always_base=always_base, metadata={INCARNATION: incarnation})


def _algorithm(config: Config) -> Algorithm:
    settings = config.algorithm
    loss = PolicyLoss(
        settings.loss,
        clip_low=settings.clip_ratio_low,
        clip_high=settings.clip_ratio_high,
        is_threshold=settings.rollout_is_threshold,
    )
    return Algorithm(loss, settings.advantage, settings.ppo_epochs, settings.mini_batches)


def _dtype(config: Config) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
