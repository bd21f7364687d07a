"""The Megatron-core train engine: tensor and data parallelism, the distributed optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from hwrl.checkpoint import LocalShards
from hwrl.comm import Comm, HashStore
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, Batch, EngineSettings, TokenLoss
from hwrl.memory import Moved, Offloader
from hwrl.models import build_model, load_model, load_tokenizer
from hwrl.train import ActivationCheckpointing, MicroBatch, PolicyEngine, VocabularyShard
from hwrl.weights import gather_weights
from hwrl_megatron.model import build_gpt, output_layer, rotary_positions
from hwrl_megatron.options import MegatronOptions
from hwrl_megatron.weights import MappedWeight, load_weights, map_weights

if TYPE_CHECKING:
    from hwrl.comm import Group

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronEngine(PolicyEngine):
    """Trains a GPTModel, equal to the model in ``settings.model_directory``, with AdamW.

    ``options.tensor_parallel`` neighbouring ranks share each layer. Each such set of ranks has a share of the batch.
    All ranks share the optimizer's float32 parameters and moments (Megatron's distributed optimizer). Gradients are
    float32. The model is always in evaluation mode.

    One engine at a time in a process: Megatron's parallel state is global. ``close`` ends it.
    """

    def __init__(
        self, settings: EngineSettings, *, backend: Backend, group: Group | None, options: MegatronOptions
    ) -> None:
        super().__init__(settings, backend=backend, group=group)
        _require_uncompiled(settings)
        _require_divisible(self._ranks, options.tensor_parallel)
        with contextlib.ExitStack() as started:
            if group is None:  # Megatron needs one
                started.callback(Comm(backend).init_default(store=HashStore(), rank=0, size=1).close)
            started.callback(parallel_state.destroy_model_parallel)
            parallel_state.initialize_model_parallel(options.tensor_parallel, create_gloo_process_groups=False)
            self._build(options)
            self._started = started.pop_all()

    def _build(self, options: MegatronOptions) -> None:
        settings, backend = self.settings, self._backend
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        model = build_gpt(
            settings.model_directory, backend=backend, tensor_parallel=options.tensor_parallel, dtype=settings.dtype
        )
        vocabulary = model.vocab_size // options.tensor_parallel
        self._checkpointing = ActivationCheckpointing(
            model.decoder.layers,
            setting=settings.activation_checkpointing,
            backend=backend,
            room_nbytes=lambda: self._usable_nbytes(vocabulary=vocabulary) - self._owed_nbytes(),
            agree=self._largest if options.tensor_parallel > 1 else None,  # a layer adds over these ranks
        )
        self.model = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model.to(backend.device(), settings.dtype).eval(),
        )
        self.scorer.shard = self._vocabulary_shard()
        self._weights = self._load(settings.model_directory)
        self.optimizer = self._build_optimizer()
        self._drop_gradients()
        self._offloader = Offloader(model, self.optimizer.optimizer, backend=backend)
        self._offloader.offload(params=settings.param_offload, optimizer=settings.optimizer_offload)

    def _load(self, directory: Path) -> list[MappedWeight]:
        whole = load_model(directory, dtype=torch.float32)
        place = {"rank": self._tensor_group.rank(), "ranks": self._tensor_group.size()}
        weights = map_weights(self.model.module, whole.config, **place)
        load_weights(weights, whole.state_dict())
        for weight in weights:  # Megatron sets it only for random weights
            if weight.dim is not None and not hasattr(weight.parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight.parameter, True, weight.dim, 1)
        return weights

    def _largest(self, number: int) -> int:
        """Return the largest ``number`` of the ranks that share each layer."""
        largest = torch.tensor([number], device=self._backend.device())
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self._tensor_group)
        return int(largest)

    def _owed_nbytes(self) -> int:
        """Return the bytes that this step will still allocate for the optimizer's moments; gradients have theirs."""
        if self.optimizer.optimizer.state:
            return 0
        return sum(8 * parameter.numel() for parameter in self.optimizer.get_parameters())

    def _build_optimizer(self) -> Any:
        settings = self.settings
        config = OptimizerConfig(
            lr=settings.learning_rate,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            weight_decay=settings.weight_decay,
            bf16=settings.dtype == torch.bfloat16,
            params_dtype=settings.dtype,
            use_distributed_optimizer=True,
        )
        chained = get_megatron_optimizer(config, [self.model], config_overrides={}, use_gloo_process_groups=False)
        (optimizer,) = chained.chained_optimizers
        return optimizer

    @property
    def data_parallel_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_parallel_size(self) -> int:
        return int(parallel_state.get_data_parallel_world_size())

    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        return self._offloader.loaded(optimizer=optimizer)

    def close(self) -> None:
        self._started.close()

    # -- training -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        for buffer in self.model.buffers:  # Megatron's flat gradient buffers, not torch's buffers
            buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
        self.model.zero_grad_buffer()
        return super().train_batch(batch, loss=loss)

    def _scores(self, part: MicroBatch) -> torch.Tensor:
        def score(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            chosen = hidden.transpose(0, 1).flatten(0, 1).index_select(0, part.places)
            return self.scorer(chosen, weight, None, part.targets).t()[:, None]

        model, bounds = self.model.module, part.boundaries
        with contextlib.ExitStack() as replaced:
            replaced.enter_context(output_layer(model, score))
            packed = None
            if bounds is not None:
                replaced.enter_context(rotary_positions(model, part.position_ids))
                ends, longest = bounds.cu_seqlens, bounds.max_length
                packed = PackedSeqParams(None, ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
            scores: torch.Tensor = self.model(part.input_ids, part.position_ids, None, packed_seq_params=packed)[0]
        return scores.t()

    @property
    def _gradient_scale(self) -> float:
        return 1.0

    def _vocabulary_shard(self) -> VocabularyShard | None:
        ranks = self._tensor_group.size()
        if ranks == 1:
            return None

        def gather(part: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(part) for _ in range(ranks)]
            torch.distributed.all_gather(parts, part.contiguous(), group=self._tensor_group)
            return torch.stack(parts)

        def add(part: torch.Tensor) -> torch.Tensor:
            torch.distributed.all_reduce(part, group=self._tensor_group)
            return part

        first = self._tensor_group.rank() * (self.model.module.vocab_size // ranks)
        return VocabularyShard(first, gather, add)

    @torch.no_grad()
    def _clip_gradients(self) -> float:
        finalize_model_grads([self.model])
        self.optimizer.prepare_grads()
        # A gradient that several ranks have counts once, on the first of them.
        squares = [grad.square().sum() for grad in self.optimizer.get_main_grads_for_grad_norm()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self._backend.device())
        if self._group is not None:
            self._group.all_reduce(total)
        norm = total.sqrt()
        scale = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.optimizer.get_parameters():
            parameter.grad.mul_(scale)
        return float(norm)

    def _update(self, *, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step_with_ready_grads()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for buffer in self.model.buffers:
            buffer.grad_data.untyped_storage().resize_(0)

    # -- weights and state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.data_parallel_rank == 0:
            parts = ((weight.name, weight.part()) for weight in self._weights)
            yield from gather_weights(parts, self._group, dtype=self.settings.dtype)

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in self._weights:
            yield weight.name, torch.empty(weight.shape, dtype=self.settings.dtype, device="meta")

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = {}, {}
        for weight in self._weights:
            tensors = self._optimizer_tensors(weight)
            model[weight.name] = tensors.pop("param")
            optimizer[weight.name] = tensors
        if self.model.module.share_embeddings_and_output_weights:
            model["lm_head.weight"] = model["model.embed_tokens.weight"]  # transformers' state has both
        return {"model": model, "optimizer": optimizer, "updates": self.updates}

    def _optimizer_tensors(self, weight: MappedWeight) -> dict[str, LocalShards]:
        """Return this rank's part of ``weight`` in float32, and of its moments."""
        flat: dict[str, torch.Tensor] = {}
        start = stop = 0
        if weight.parameter in self.optimizer.model_param_group_index_map:
            owned = self.optimizer._get_model_param_range_map(weight.parameter)["param"]
            start, stop = owned.start, owned.end
            self._require_moments(weight)
            flat = self.optimizer._get_main_param_and_optimizer_states(weight.parameter)
        return {
            key: LocalShards(
                weight.shape,
                torch.float32,
                {
                    offset: flat[key].detach()[elements.start - start : elements.stop - start].view(size)
                    for offset, elements, size in weight.rectangles(start, stop)
                },
            )
            for key in ("param", *_MOMENTS)
        }

    def _require_moments(self, weight: MappedWeight) -> None:
        """Create the optimizer's moments now; it would create them in its first step."""
        main = self.optimizer._get_main_param_and_optimizer_states(weight.parameter)["param"]
        state = self.optimizer.optimizer.state[main]
        for key in _MOMENTS:
            state.setdefault(key, torch.zeros_like(main, requires_grad=False))
        if isinstance(self.optimizer.optimizer, torch.optim.AdamW):
            state.setdefault("step", torch.tensor(0.0))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        mine = self.state_dict()
        for name, shards in mine["model"].items():
            _copy(shards, state["model"][name])
        for name, moments in mine["optimizer"].items():
            for key, shards in moments.items():
                _copy(shards, state["optimizer"][name][key])
        self._set_step(self.updates)
        self.optimizer._copy_main_params_to_model_params()
        self.model.start_param_sync()

    def _set_step(self, step: int) -> None:
        """Set the optimizer's step count: torch keeps it for each parameter, fused optimizers for each group."""
        inner = self.optimizer.optimizer
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(step)
        if not isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["step"] = step

    def export(self, directory: Path) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.named_weights()}
        if self._group is not None and self._group.rank != 0:
            return
        model = build_model(self.settings.model_directory, dtype=self.settings.dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        model.save_pretrained(directory)
        load_tokenizer(self.settings.model_directory).save_pretrained(directory)


def _copy(target: LocalShards, source: LocalShards) -> None:
    for offset, piece in target.pieces.items():
        piece.copy_(source.pieces[offset])


def _require_uncompiled(settings: EngineSettings) -> None:
    if settings.compile is True:
        raise ConfigError(
            "train.compile=true is not possible with train.engine=megatron",
            why="its layers have kernels of their own, and are not compiled",
            fix="set train.compile to auto or false",
        )


def _require_divisible(ranks: int, tensor_parallel: int) -> None:
    if ranks % tensor_parallel:
        raise ConfigError(
            f"train.engine_options.tensor_parallel={tensor_parallel} is not possible on {ranks} ranks",
            why="each copy of the model needs that number of ranks",
            fix=f"set train.ranks to {tensor_parallel} or a multiple of it",
        )
