"""Make the parts of a run from its configuration, in the process that will use them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Comm, Group, connect_store
from hwrl.errors import ConfigError
from hwrl.models import load_generation_config, load_tokenizer
from hwrl.registry import get_backend
from hwrl.rollout.data import Prompt, PromptStream, load_prompts
from hwrl.rollout.embedded import EmbeddedEngine
from hwrl.rollout.engine import RolloutEngine, RolloutSettings, Sampling
from hwrl.rollout.inlet import Link, ModelInlet
from hwrl.rollout.reward import load_reward
from hwrl.rollout.rollouter import LedgerClient, Rollouter
from hwrl.run.config import EMBEDDED, FSDP, Config
from hwrl.run.inputs import load_rollout_engine, load_train_engine
from hwrl.train.engine import EngineSettings, TrainEngine
from hwrl.train.fsdp import FsdpEngine
from hwrl.train.gather import SharedWeights
from hwrl.train.losses import PolicyLoss
from hwrl.train.rng import rng_state, set_rng_state
from hwrl.train.trainer import Algorithm, AsyncTrainer
from hwrl.weights import WeightReceiver, WeightSender
from hwrl.weights.sender import Transport

POLICY = "policy"
"""The name under which the policy's weights travel."""


def prepare_process(*, threads: int) -> None:
    """Take the first visible device of the chosen backend; compute with ``threads`` host threads."""
    torch.set_num_threads(threads)
    if get_backend().device_count():
        get_backend().set_device(0)


def evaluation_prompts(config: Config) -> list[Prompt]:
    """Return the prompts to evaluate on: none if the configuration names no evaluation data."""
    if config.data.eval is None:
        return []
    return _prompts(config, config.data.eval)[: config.eval.prompts]


def build_rollouter(config: Config, *, replica: str, seed: int, store_address: str, ledger: LedgerClient) -> Rollouter:
    """Return a rollouter that waits for its first weights; it never reads the training model's weights."""
    tokenizer = load_tokenizer(config.model.path)
    engine = _build_rollout_engine(config, tokenizer, seed=seed)
    return Rollouter(
        engine,
        ledger=ledger,
        prompts=PromptStream(_prompts(config, config.data.train), seed=config.seed),
        reward=load_reward(config.reward.function),
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
        sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature),
        group_size=config.rollout.n,
        weights=ModelInlet(engine, _link(config, store_address=store_address, replica=replica)),
        partial_rollout=config.async_training.partial_rollout,
        reward_attempts=config.reward.attempts,
    )


def _link(config: Config, *, store_address: str, replica: str) -> Link:
    timeout_s = _transfer_timeout_s(config)
    receiver = WeightReceiver(connect_store(store_address), name=POLICY, replica=replica, timeout_s=timeout_s)
    # The sender waits once for the receivers and once for their votes; a receiver must not give up before it does.
    return Link(receiver, patience_s=3 * timeout_s)


def _transfer_timeout_s(config: Config) -> float:
    """Return how long the sender waits for replicas: without partial rollout they finish their responses first."""
    drain_s = 0.0 if config.async_training.partial_rollout else config.rollout.group_timeout_s
    return config.weights.timeout_s + drain_s


def _prompts(config: Config, path: Path) -> list[Prompt]:
    tokenizer = load_tokenizer(config.model.path)
    return load_prompts(
        path,
        tokenize=lambda text: tokenizer(text)["input_ids"],
        max_prompt_tokens=config.data.max_prompt_tokens,
    )


def _build_rollout_engine(config: Config, tokenizer: Any, *, seed: int) -> RolloutEngine:
    settings = RolloutSettings(
        model_directory=config.model.path,
        dtype=_dtype(config),
        eos_ids=_end_ids(config.model.path, tokenizer),
        max_running=config.rollout.max_running,
        max_length=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        seed=seed,
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
        self, config: Config, *, rank: int, store_address: str, incarnation: int, transport: Transport
    ) -> None:
        self._config, self._rank = config, rank
        backend = get_backend()
        store = connect_store(store_address)
        ranks = config.train.ranks
        self._group: Group | None = None
        if ranks > 1:
            place = PrefixStore(f"train/{incarnation}", store)
            self._group = Comm(backend).init_default(store=place, rank=rank, size=ranks)
        self._engine = _build_train_engine(config, group=self._group)
        self._sender = _build_sender(config, store, transport) if rank == 0 else None
        self._trainer = AsyncTrainer(
            self._engine,
            algorithm=_algorithm(config),
            publish=self._send,
            max_staleness=config.async_training.staleness_threshold,
            trigger_parameter_sync_step=config.async_training.trigger_parameter_sync_step,
        )
        self._data_hash = hashlib.sha256(config.data.train.read_bytes()).hexdigest()
        self._checkpoints = CheckpointManager(
            config.dir / "checkpoints",
            max_ckpt_to_keep=config.checkpoint.max_ckpt_to_keep,
            async_save=config.checkpoint.async_save,
            group=self._group,
        )

    def resume(self) -> dict[str, Any] | None:
        """Load the newest complete checkpoint; return its ``extra`` and what was skipped, or None."""
        with self._engine.on_device(optimizer=True):
            state = self._engine.state_dict()
            resumed = self._checkpoints.resume(state)
            if resumed is None:
                return None
            self._check_data(resumed.extra["data"])
            self._engine.load_state_dict(state)
        self._trainer.load_state_dict(resumed.extra["trainer"])
        if self._rank < len(resumed.rank_extras):  # a rank that is new keeps the state that it started with
            set_rng_state(resumed.rank_extras[self._rank]["rng"], get_backend())
        return {**resumed.extra, "step": resumed.step, "skipped": [str(skipped) for skipped in resumed.skipped]}

    def _check_data(self, saved_hash: str) -> None:
        if saved_hash != self._data_hash:
            raise ConfigError(
                f"{self._config.data.train} has changed since the checkpoint",
                why="the order of the prompts depends on it, so prompts would be lost or trained twice",
                fix="put the old file back, or begin a new run in another dir=…",
            )

    def publish(self) -> dict[str, float]:
        """Publish the current weights."""
        return self._trainer.publish()

    def joiners(self) -> tuple[str, ...]:
        """Return the replicas that have joined and lack the newest weights."""
        return () if self._sender is None else self._sender.joiners()

    def step(self, groups: Any) -> dict[str, float]:
        """Train one step."""
        return self._trainer.step(groups)

    def save(self, ledger: dict[str, Any]) -> dict[str, float]:
        """Save this moment; return what it cost."""
        with self._engine.saved_state() as (state, offloader):
            report = self._checkpoints.save(
                self._trainer.steps_done,
                state,
                offloader=offloader,
                extra={"trainer": self._trainer.state_dict(), "ledger": ledger, "data": self._data_hash},
                rank_extra={"rng": rng_state(get_backend())},
                weight_version=self._trainer.version,
            )
        return {"checkpoint/blocked_s": report.blocked_s, "checkpoint/waited_s": report.waited_s}

    def export(self) -> None:
        """Write the trained model to the run directory, for transformers."""
        with self._engine.on_device(optimizer=False):
            self._engine.export(self._config.dir / "model")

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
            report = self._sender.publish(version, weights.model)
        return {
            "sync/nbytes": float(report.nbytes),
            "sync/receivers": float(report.receivers),
            "sync/quarantined": float(len(report.quarantined)),
            **{f"sync/{stage}_s": value for stage, value in report.seconds.items()},
        }


def _build_train_engine(config: Config, *, group: Group | None) -> TrainEngine:
    settings = EngineSettings(
        model_directory=config.model.path,
        total_steps=config.train.steps * config.algorithm.ppo_epochs * config.algorithm.mini_batches,
        micro_batch_tokens=config.train.micro_batch_tokens,
        temperature=config.rollout.temperature,
        dtype=_dtype(config),
        param_offload=config.train.param_offload,
        optimizer_offload=config.train.optimizer_offload,
        **config.optimizer.model_dump(),
    )
    if config.train.engine == FSDP:
        return FsdpEngine(settings, backend=get_backend(), group=group)
    engine: TrainEngine = load_train_engine(config)(
        settings=settings, options=config.train.engine_options, backend=get_backend(), group=group
    )
    return engine


def _build_sender(config: Config, store: Any, transport: Transport) -> WeightSender:
    slab_mib = config.weights.update_weights_bucket_megabytes
    return WeightSender(
        store,
        name=POLICY,
        transport=transport,
        slab_nbytes=None if slab_mib is None else slab_mib << 20,
        timeout_s=_transfer_timeout_s(config),
    )


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
