"""verl's own workers on the CPU, with what a test needs to look into them, and a group of them on Ray."""

# mypy: disable-error-code="misc, untyped-decorator"
# verl's types are not followed.

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.memory import Offloader

pytest.importorskip("verl", reason="needs verl: make test-stack-verl")

with warnings.catch_warnings(action="ignore"):  # verl's own
    # verl does without Megatron, whose import takes as long as verl's.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type] # None stands for "not installed"
    import ray as ray  # a name of this module for the tests
    from tensordict.tensorclass import NonTensorData
    from verl.checkpoint_engine import CheckpointEngineManager as CheckpointEngineManager
    from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.utils.import_utils import import_external_libs
    from verl.workers.config import (
        CheckpointEngineConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        RolloutConfig,
    )
    from verl.workers.config.engine import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.rollout import BaseRollout, RolloutReplica
    from verl.workers.utils.losses import sft_loss

    from hwrl_verl.platform import HwrlPlatform as HwrlPlatform

from tests.plugins.verl import nccl_on_gloo
from tests.support.optimizers import frozen

REPO = Path(__file__).parents[3]
ENV = {
    "HWRL_BACKEND": "cpu",
    "VERL_PLATFORM": "hwrl",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its own engines for no CPU
    "VERL_ENGINE_VENDOR": "hwrl",
    "VERL_USE_EXTERNAL_MODULES": "hwrl_verl.platform",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPO),
}


@contextmanager
def cluster() -> Iterator[None]:
    """Run Ray of this process's own for the block, with verl's settings in this process and in all workers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ENV})
        try:
            yield
        finally:
            ray.shutdown()


class SeveralEngines:
    """A worker that changes its checkpoint engine, to compare them in one run."""

    engines: dict[str, Any]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_engine(self, sync: CheckpointEngineConfig) -> None:
        self.engines = getattr(self, "engines", {})
        key = _key_of(sync)
        if key not in self.engines:
            import_external_libs(sync.custom_backend_module)
            options = {**sync.engine_kwargs.get(sync.backend, {}), **self.master()}
            bucket_size = sync.update_weights_bucket_megabytes << 20
            self.engines[key] = CheckpointEngineRegistry.new(sync.backend, bucket_size=bucket_size, **options)
        self.checkpoint_engine = self.engines[key]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def install_nccl_on_gloo(self, store: str) -> None:
        nccl_on_gloo.install(store)

    def master(self) -> dict[str, bool]:
        return {}


def _key_of(sync: CheckpointEngineConfig) -> str:
    return f"{sync.backend} {sync.engine_kwargs}"


class Actor(SeveralEngines, TrainingWorker):
    """A training worker with a checkpoint engine, as verl's ActorRolloutRefWorker has it."""

    def __init__(self, config: TrainingWorkerConfig, sync: CheckpointEngineConfig, vendor: str) -> None:
        os.environ["VERL_ENGINE_VENDOR"], self.fault = vendor, ""
        initialize_global_process_group_ray(backend="cpu:gloo")  # verl would name the CPU's library twice
        super().__init__(config)
        self.engine.initialize()
        self.set_loss_fn(functools.partial(sft_loss, None))
        self.use_engine(sync)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        weights, _ = self.engine.get_per_tensor_param()
        if self.fault:
            weights = _failing(iter(weights), self.fault)
        self.fault = ""
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def master(self) -> dict[str, bool]:
        return {"is_master": True} if self.rank == 0 else {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, fault: str) -> None:
        self.fault = fault

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> float:
        """Take one step on this rank's batch; return the loss before it."""
        output = self.train_batch(batch_of(seed, self.rank, self.world_size))
        return float(tu.get(output, "metrics")["loss"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.engine.get_per_tensor_param()[0]}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, path: str, step: int, keep: int | None = None) -> None:
        self.engine.save_checkpoint(path, None, step, max_ckpt_to_keep=keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> None:
        self.engine.load_checkpoint(path, None, del_local_after_load=False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> Any:
        """Return this rank's model, optimizer, schedule and torch's random numbers, for a comparison bit for bit."""
        engine = self.engine
        offloader = next((value for value in vars(engine).values() if isinstance(value, Offloader)), None)
        with nullcontext() if offloader is None else offloader.loaded():
            parts = [engine.module, engine.optimizer, engine.lr_scheduler]
            return frozen([*(part.state_dict() for part in parts), torch.get_rng_state()])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self, expression: str) -> Any:
        """Return the value of ``expression`` about ``worker``."""
        return eval(expression, {"worker": self, "torch": torch, "os": os})


def _failing(weights: Iterator[tuple[str, torch.Tensor]], fault: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield next(weights)
    raise RuntimeError(fault)


class KeptWeights(BaseRollout):
    """A rollout that keeps a copy of the weights, and fails on demand."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.replica_rank, self.is_leader_rank = 0, True
        self.weights: dict[str, torch.Tensor] = {}
        self.steps: list[int | None] = []
        self.fault = ""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: nothing sleeps."""

    async def release(self) -> None:
        """Do nothing: nothing sleeps."""

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int | None = None, **_: Any
    ) -> None:
        fault, self.fault = self.fault, ""
        if fault == "at once":
            raise RuntimeError("this worker fails at once")
        if fault == "dies":
            os._exit(1)
        kept = {}
        async for name, tensor in weights:
            kept[name] = tensor.clone()
            if fault == "after a tensor":
                raise RuntimeError("this worker fails after a tensor")
        self.weights = kept
        self.steps.append(global_steps)


class Rollout(SeveralEngines, CheckpointEngineWorker):
    """A rollout worker whose engine is :class:`KeptWeights`."""

    def __init__(self, rollout_config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(rollout_config, model_config, KeptWeights(rollout_config, model_config))
        self.engines = {_key_of(rollout_config.checkpoint_engine): self.checkpoint_engine}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self) -> tuple[dict[str, torch.Tensor], list[int | None]]:
        return self.server_adapter.weights, self.server_adapter.steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, fault: str) -> None:
        self.server_adapter.fault = fault


class Replica(RolloutReplica):
    """One rollout worker; its requests are only counted."""

    def __init__(self, worker: Any, config: RolloutConfig, model_config: HFModelConfig) -> None:
        super().__init__(0, config, model_config)
        self.workers, self.serving = [worker], True

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.serving = False

    async def resume_generation(self) -> None:
        self.serving = True

    async def release_kv_cache(self) -> None:
        """Do nothing: there is no cache."""

    async def resume_kv_cache(self) -> None:
        """Do nothing: there is no cache."""

    def get_ray_class_with_init_args(self) -> Any:
        raise NotImplementedError

    async def launch_servers(self) -> None:
        raise NotImplementedError


def sync_config(backend: str = "hwrl", **options: Any) -> CheckpointEngineConfig:
    module = "hwrl_verl.checkpoint_engine" if backend == "hwrl" else None
    return CheckpointEngineConfig(
        backend=backend,
        update_weights_bucket_megabytes=64,
        engine_kwargs={backend: options},
        custom_backend_module=module,
    )


def hf_config(path: Path) -> HFModelConfig:
    return HFModelConfig(
        path=str(path),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )


def training_config(
    model: Path, ranks: int, *, offload: bool = False, async_save: bool = False, **optimizer: Any
) -> TrainingWorkerConfig:
    """Return the configuration of ``ranks`` ranks that train ``model`` with verl's FSDP2 engine."""
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        fsdp_size=ranks,
        model_dtype="fp32",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        use_torch_compile=False,
        param_offload=offload,
        optimizer_offload=offload,
    )
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=hf_config(model),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=100, **optimizer),
        checkpoint_config=CheckpointConfig(async_save=async_save),
    )


def actors(
    model: Path,
    ranks: int,
    *,
    sync: CheckpointEngineConfig,
    name: str = "actor",
    vendor: str = "hwrl",
    offload: bool = False,
    async_save: bool = False,
    **optimizer: Any,
) -> RayWorkerGroup:
    """Start ``ranks`` actors that train ``model``, with these settings of the optimizer."""
    config = training_config(model, ranks, offload=offload, async_save=async_save, **optimizer)
    return _group(Actor, ranks, name, config=config, sync=sync, vendor=vendor)


def rollouts(model: Path, count: int, *, sync: CheckpointEngineConfig) -> tuple[RayWorkerGroup, list[Replica]]:
    """Start ``count`` rollout workers, each a replica of its own."""
    config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=sync)
    group = _group(Rollout, count, "rollout", rollout_config=config, model_config=hf_config(model))
    return group, [Replica(worker, config, hf_config(model)) for worker in group.workers]


def _group(cls: type, ranks: int, name: str, **arguments: Any) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=True, name_prefix=name, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def batch_of(seed: int, rank: int, ranks: int) -> Any:
    """Return rank ``rank``'s two sequences of different lengths."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    lengths = torch.randint(4, 12, (2,), generator=generator).tolist()
    rows = [torch.randint(2, 16, (length,), generator=generator) for length in lengths]
    tensors = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged),
    }
    plain = {
        "use_remove_padding": False,
        "temperature": 1.0,
        "global_batch_size": 2 * ranks,
        "pad_mode": "no_padding",
        "pad_token_id": 0,
        "update_lr_scheduler": True,
    }
    data = tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=plain)
    tu.assign_non_tensor(data, global_token_num=NonTensorData(lengths))
    return data
