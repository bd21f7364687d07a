"""The Megatron-core train engine: tensor, data, pipeline and expert parallelism, the distributed optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
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
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from hwrl.checkpoint import LocalShards
from hwrl.comm import Comm, HashStore
from hwrl.interfaces import Backend, Batch, EngineSettings, TokenLoss
from hwrl.memory import Moved, Offloader
from hwrl.model_files import write_model
from hwrl.models import build_meta_model, load_model_config, load_tokenizer
from hwrl.train import ActivationCheckpointing, MicroBatch, PolicyEngine, VocabularyShard
from hwrl.weights import WeightShard, gather_weights
from hwrl_megatron.layout import saved_tensors
from hwrl_megatron.loading import load_weights
from hwrl_megatron.model import build_gpt, output_layer, rotary_positions
from hwrl_megatron.options import MegatronOptions
from hwrl_megatron.pipeline import run_stages
from hwrl_megatron.supported import make_layout, require_settings
from hwrl_megatron.weights import MappedWeight, map_weights

if TYPE_CHECKING:
    from hwrl.comm import Group

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronEngine(PolicyEngine):
    """Trains a GPTModel, equal to the model in ``settings.model_directory``, with AdamW.

    A copy of the model is on ``options.pipeline_parallel`` stages of ``options.tensor_parallel`` neighbouring ranks.
    The ranks of a stage share each of its layers. All ranks of a copy have the same share of the batch.
    ``options.expert_parallel`` copies share the model's experts. All ranks with the same parameters share the
    optimizer's float32 parameters and moments (Megatron's distributed optimizer). Gradients are float32. The model is
    always in evaluation mode. :attr:`checkpointing` tells how many layers the newest pass recomputed.

    A process has one engine at a time, because Megatron's parallel state is global. ``close`` ends that state.
    """

    def __init__(
        self, settings: EngineSettings, *, backend: Backend, group: Group | None, options: MegatronOptions
    ) -> None:
        super().__init__(settings, backend=backend, group=group)
        require_settings(settings)
        config = load_model_config(settings.model_directory)
        rank = 0 if group is None else group.rank
        self._layout = make_layout(config, options, rank=rank, ranks=self._ranks)
        with contextlib.ExitStack() as started:
            if group is None:  # Megatron needs a group, also for one rank
                started.callback(Comm(backend).init_default(store=HashStore(), rank=0, size=1).close)
            started.callback(parallel_state.destroy_model_parallel)
            parallel_state.initialize_model_parallel(
                options.tensor_parallel,
                options.pipeline_parallel,
                expert_model_parallel_size=options.expert_parallel,
                create_gloo_process_groups=False,
            )
            self._build(config)
            self._started = started.pop_all()

    def _build(self, config: Any) -> None:
        settings, backend, layout = self.settings, self._backend, self._layout
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._saved = list(saved_tensors(config, layout))
        model = build_gpt(config, layout, backend=backend, dtype=settings.dtype)
        self.checkpointing = self._activation_checkpointing(model)
        self.model = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        self.scorer.shard = self._vocabulary_shard()
        self._weights = map_weights(model, config, layout)
        self._load(settings.model_directory)
        self.optimizer = self._build_optimizer()
        self._drop_gradients()
        self._offloader = Offloader(model, self.optimizer, backend=backend)
        self._offloader.offload(params=settings.param_offload, optimizer=settings.optimizer_offload)

    def _activation_checkpointing(self, model: GPTModel) -> ActivationCheckpointing:
        layout = self._layout
        vocabulary = model.vocab_size // layout.tensor
        under_way = layout.stages - layout.stage  # passes whose activations this stage has at the same time
        return ActivationCheckpointing(
            model.decoder.layers,
            setting=self.settings.activation_checkpointing,
            backend=self._backend,
            room_nbytes=lambda: (self._usable_nbytes(vocabulary=vocabulary) - self.owed_nbytes()) // under_way,
            agree=self._largest if layout.tensor * layout.experts > 1 else None,  # these ranks meet in each layer
        )

    def _load(self, directory: Path) -> None:
        load_weights(self._weights, self._saved, directory, group=self._group, backend=self._backend)
        for weight in self._weights:  # Megatron sets these attributes only when it draws random weights
            if weight.saved.dim is not None and not hasattr(weight.parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight.parameter, True, weight.saved.dim, 1)

    def _largest(self, number: int) -> int:
        """Return the largest ``number`` of the ranks that share a layer and its experts."""
        largest = torch.tensor([number], device=self._backend.device())
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(largest)

    def owed_nbytes(self) -> int:
        """Return the bytes of the optimizer's moments if this step will allocate them; gradients are allocated."""
        return sum(
            8 * parameter.numel()
            for optimizer in self._optimizers
            for parameter in optimizer.get_parameters()
            if not optimizer.optimizer.state
        )

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
        return get_megatron_optimizer(config, [self.model], config_overrides={}, use_gloo_process_groups=False)

    @property
    def _optimizers(self) -> list[Any]:
        """Megatron's optimizers: one, and another one for the experts if several ranks share them."""
        optimizers: list[Any] = self.optimizer.chained_optimizers
        return optimizers

    @property
    def _gradient_buffers(self) -> list[Any]:
        """Megatron's flat gradient buffers."""
        return [*self.model.buffers, *self.model.expert_parallel_buffers]

    @property
    def data_parallel_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_parallel_size(self) -> int:
        return int(parallel_state.get_data_parallel_world_size())

    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        return self._offloader.loaded(optimizer=optimizer)

    def close(self) -> None:
        started = self._started
        started.close()
        # Hooks of parameters refer to the engine: the groups, each with a thread, would live as long as the process.
        vars(self).clear()
        self._started = started  # to be closed again

    # -- training -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        for buffer in self._gradient_buffers:
            buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
        self.model.zero_grad_buffer()
        return super().train_batch(batch, loss=loss)

    def _scores(self, part: MicroBatch) -> torch.Tensor:
        return self._run_stage(part)

    def _run_stage(self, part: MicroBatch) -> torch.Tensor:
        """Return this stage's result: hidden states, and on the last stage the scores (2 × targets)."""

        def score(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            chosen = hidden.transpose(0, 1).flatten(0, 1).index_select(0, part.places)
            return self.scorer(chosen, weight, None, part.targets).t()[:, None]

        model, bounds = self.model.module, part.boundaries
        with contextlib.ExitStack() as replaced:
            if model.post_process:
                replaced.enter_context(output_layer(model, score))
            packed = None
            if bounds is not None:
                replaced.enter_context(rotary_positions(model, part.position_ids))
                ends, longest = bounds.cu_seqlens, bounds.max_length
                packed = PackedSeqParams(None, ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
            result: torch.Tensor = self.model(part.input_ids, part.position_ids, None, packed_seq_params=packed)
        return result[0].t() if model.post_process else result

    def _training_passes(
        self, plan: Sequence[MicroBatch], *, loss: TokenLoss, tokens: float
    ) -> Generator[tuple[MicroBatch, dict[str, torch.Tensor]]]:
        if self._layout.stages == 1:
            yield from super()._training_passes(plan, loss=loss, tokens=tokens)
            return
        scale = self._gradient_scale / tokens

        def run(part: MicroBatch) -> torch.Tensor:
            with self._scoring_for(part, loss, scale):
                return self._run_stage(part)

        def scaled(part: MicroBatch, scores: torch.Tensor) -> torch.Tensor:
            return scale * self._loss(part, *self._without_padding(part, scores), loss=loss)[0]

        for part, scores in zip(plan, run_stages(self.model, plan, run, loss=scaled), strict=True):
            yield part, self._loss(part, *self._without_padding(part, scores), loss=loss)[1]

    def _scoring_passes(self, plan: Sequence[MicroBatch]) -> Generator[tuple[MicroBatch, torch.Tensor]]:
        if self._layout.stages == 1:
            yield from super()._scoring_passes(plan)
            return
        for part, scores in zip(plan, run_stages(self.model, plan, self._run_stage), strict=True):
            yield part, self._without_padding(part, scores)[0]

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
        for parameter in self._expert_parameters():  # each tensor-parallel rank sent all tokens: the sum is too large
            parameter.main_grad.div_(self._layout.tensor)  # type: ignore[attr-defined] # Megatron adds it
        finalize_model_grads([self.model])
        squares = []
        for optimizer in self._optimizers:
            optimizer.prepare_grads()
            # If several ranks have a gradient, it counts once, on the first of them.
            squares += [grad.square().sum() for grad in optimizer.get_main_grads_for_grad_norm()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self._backend.device())
        if self._group is not None:
            self._group.all_reduce(total)
        norm = total.sqrt()
        scale = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for optimizer in self._optimizers:
            for parameter in optimizer.get_parameters():
                parameter.grad.mul_(scale)
        return float(norm)

    def _expert_parameters(self) -> list[torch.nn.Parameter]:
        """Return the experts' parameters if several ranks share each of them."""
        if self._layout.tensor == 1:
            return []
        named = self.model.module.named_parameters()
        return [parameter for name, parameter in named if ".experts." in name]

    def _update(self, *, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for optimizer in self._optimizers:
            optimizer.step_with_ready_grads()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for buffer in self._gradient_buffers:
            buffer.grad_data.untyped_storage().resize_(0)

    # -- weights and state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from gather_weights(self._parts(), self._group, dtype=self.settings.dtype)

    def _parts(self) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        """Yield every saved tensor, with this rank's part of it."""
        mine = {weight.saved.name: weight for weight in self._weights if not weight.saved.copy}
        nothing = torch.empty(0, dtype=self.settings.dtype, device=self._backend.device())
        for saved in self._saved:
            if saved.copy:
                continue
            owners = saved.owners(self._layout)
            part = mine[saved.name].dense() if self._layout.rank in owners else nothing
            if self._group is not None:
                yield saved.name, WeightShard(part, saved.shape, saved.dim or 0, owners)
            else:
                yield saved.name, part

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        for saved in self._saved:
            if not saved.copy:
                yield saved.name, torch.empty(saved.shape, dtype=self.settings.dtype, device="meta")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's rectangles of the tensors of transformers' state dict, with packed experts, in float32."""
        keys = ("param", *_MOMENTS)
        found = {
            saved.own_name: {key: LocalShards(saved.own_shape, torch.float32, {}) for key in keys}
            for saved in self._saved
        }
        for weight in self._weights:
            self._add_rectangles(weight, found[weight.saved.own_name])
        model = {name: tensors.pop("param") for name, tensors in found.items()}
        if self.model.module.share_embeddings_and_output_weights:
            model["lm_head.weight"] = model["model.embed_tokens.weight"]  # transformers' state has both
        return {"model": model, "optimizer": found, "updates": self.updates}

    def _add_rectangles(self, weight: MappedWeight, whole: dict[str, LocalShards]) -> None:
        """Add this rank's part of ``weight`` in float32, and of its moments, to ``whole``."""
        for optimizer in self._optimizers:
            if weight.parameter not in optimizer.model_param_group_index_map:
                continue
            owned = optimizer._get_model_param_range_map(weight.parameter)["param"]
            flat = _main_tensors(optimizer, weight.parameter)
            for offset, elements, size in weight.rectangles(owned.start, owned.end):
                here = slice(elements.start - owned.start, elements.stop - owned.start)
                for key, shards in whole.items():
                    shards.pieces[offset] = flat[key].detach()[here].view(size)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        mine = self.state_dict()
        for name, shards in mine["model"].items():
            _copy(shards, state["model"][name])
        for name, moments in mine["optimizer"].items():
            for key, shards in moments.items():
                _copy(shards, state["optimizer"][name][key])
        for optimizer in self._optimizers:
            _set_step(optimizer.optimizer, self.updates)
            optimizer._copy_main_params_to_model_params()
        self.model.start_param_sync()

    def export(self, directory: Path) -> None:
        weights = self.named_weights()
        try:
            if self._group is None or self._group.rank == 0:
                model = build_meta_model(self.settings.model_directory, dtype=self.settings.dtype)
                write_model(directory, model, self.weights_metadata(), weights, dtype=self.settings.dtype)
                load_tokenizer(self.settings.model_directory).save_pretrained(directory)
        finally:
            for _ in weights:  # after an error, too: the other ranks send to the end
                pass


def _main_tensors(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return this rank's float32 elements of ``parameter`` and its moments, each flat.

    Creates the moments if there are none: the optimizer itself would in its first step.
    """
    main = optimizer._get_main_param_and_optimizer_states(parameter)["param"]
    state = optimizer.optimizer.state[main]
    for key in _MOMENTS:
        state.setdefault(key, torch.zeros_like(main, requires_grad=False))
    if isinstance(optimizer.optimizer, torch.optim.AdamW):
        state.setdefault("step", torch.tensor(0.0))
    tensors: dict[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return tensors


def _set_step(inner: torch.optim.Optimizer, step: int) -> None:
    """Set the optimizer's step count: torch keeps it for each parameter, fused optimizers for each group."""
    for state in inner.state.values():
        if "step" in state:
            state["step"].fill_(step)
    if not isinstance(inner, torch.optim.AdamW):
        for group in inner.param_groups:
            group["step"] = step


def _copy(target: LocalShards, source: LocalShards) -> None:
    for offset, piece in target.pieces.items():
        piece.copy_(source.pieces[offset])
