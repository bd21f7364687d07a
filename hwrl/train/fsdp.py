"""The FSDP2 train engine: any ``AutoModelForCausalLM`` directory, on one rank or sharded over several."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from hwrl.checkpoint import parameter_names
from hwrl.comm import Comm, Group, HashStore
from hwrl.discovery import kernels
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, Batch, EngineSettings, Moved, OffloadedState, TokenLoss
from hwrl.lora import adapter_name, base_name, save_adapter, with_adapter, without_adapter
from hwrl.memory import Offloader
from hwrl.model_files import write_model
from hwrl.models import load_tokenizer, model_identity, use_working_experts
from hwrl.saved_names import SavedNames
from hwrl.train.activations import ActivationCheckpointing
from hwrl.train.causal import CausalModel
from hwrl.train.compiling import Compiler, explained_compilation, wants_compilation
from hwrl.train.compute_copy import ComputeCopy
from hwrl.train.context_parallel import make_context_group
from hwrl.train.kernels import apply_kernels
from hwrl.train.loading import WeightReader, allocate, open_model, own_slice, persistent_buffers, read_weights
from hwrl.train.packing import MicroBatch
from hwrl.train.policy import PolicyEngine
from hwrl.train.sharding import ShardedModel, layers_of, outermost
from hwrl.train.state_memory import StateMemory
from hwrl.weights import WeightShard, gather_weights

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpEngine(PolicyEngine):
    """Trains the model in ``settings.model_directory``, or an adapter on it, with AdamW.

    ``group`` is the default process group of the training ranks (None: one rank; the model is then not wrapped,
    unless it steps on the host). :attr:`model` has the float32 parameters; those below an adapter are in ``dtype``.
    On one rank with another ``dtype``, a copy in that dtype computes; on several, FSDP2 casts. Gradients are float32.
    Each rank reads its own part of the weights. The model is always in evaluation mode: dropout would add noise to the
    ratio to the behaviour policy. ``settings.context_parallel`` neighbouring ranks share each pack.

    :attr:`sharded` is the wrapped model, or None; it knows whether weights and gradients stay whole between the passes
    of a step. :attr:`checkpointing` knows how many layers the newest pass recomputed.

    With ``settings.host_step`` on one rank, the engine needs a default group of one process: if there is none, it makes
    one, and :meth:`close` ends it. The engine owns ``reference``, the engine for :meth:`reference_logprobs`, and closes
    it, too.
    """

    _calls: type[CausalModel] = CausalModel

    def __init__(
        self, settings: EngineSettings, *, backend: Backend, group: Group | None, reference: FsdpEngine | None = None
    ) -> None:
        self._reference = reference
        with contextlib.ExitStack() as started:
            if reference is not None:
                started.callback(reference.close)
            if settings.host_step:
                if settings.param_offload or settings.optimizer_offload:
                    raise ConfigError(
                        "train.host_step cannot be combined with train.param_offload or train.optimizer_offload",
                        why="parameters and optimizer state are in host memory already, in the step, too",
                        fix="set train.param_offload and train.optimizer_offload to false",
                    )
                group = group or _group_of_one(backend, started)  # FSDP2 needs one
            super().__init__(settings, backend=backend, group=group)
            self._build(settings, backend, group)
            self._started = started.pop_all()

    def _build(self, settings: EngineSettings, backend: Backend, group: Group | None) -> None:
        self._context = make_context_group(
            settings.context_parallel, directory=settings.model_directory, group=group, backend=backend
        )
        self._dtype = settings.dtype
        self._level = logging.WARNING if group is None or group.rank == 0 else logging.DEBUG  # once a run
        directory = settings.model_directory
        model, reader = open_model(
            directory, group=group, backend=backend, level=self._level, max_length=settings.max_length
        )
        use_working_experts(model, device=backend.device(), dtype=settings.dtype)
        self._saved = SavedNames.of(model)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        model = self._adapted(model)
        self._compiler: Compiler | None = None
        if wants_compilation(backend, setting=settings.compile):
            self._compiler = Compiler(required=settings.compile is True, level=self._level)
        self._memory = StateMemory.of(model, layers_of(model), settings, ranks=self._ranks)
        layers = self._place(model, reader)
        del reader  # it may hold a whole model
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        where = torch.device("cpu") if settings.host_step else backend.device()
        self.optimizer: Any = None  # a frozen model has none
        if self._trained:
            self.optimizer = torch.optim.AdamW(
                self._trained, **self._hyperparameters(), fused=True if runs_fused(where.type) else None
            )
        self._causal = self._calls(backend=backend, scorer=self.scorer, level=self._level, context=self._context)
        self._causal.prove(self.compute_model, dtype=settings.dtype, max_length=settings.max_length)
        if self.sharded is not None:
            self.sharded.reshard()
        self._prepare_layers(layers)
        self._offloader = Offloader(self.model, self.optimizer, backend=backend)
        if settings.param_offload and self._copy is not None:
            self._copy.free()
        self._offloader.offload(params=settings.param_offload, optimizer=settings.optimizer_offload)

    def _adapted(self, model: Any) -> Any:
        """Return ``model``, on the meta device, with the modules that this engine adds: here, an adapter."""
        if self.settings.lora is None:
            return model
        self.base = _agreed_identity(self.settings.model_directory, self._group, self._backend)
        return with_adapter(model, self.settings.lora, seed=self.settings.seed, base_dtype=self.settings.dtype)

    def _place(self, model: Any, reader: WeightReader) -> list[torch.nn.Module]:
        """Put ``model`` on the device, whole or as a shard; return the layers that run, of a compute copy if any."""
        self._copy: ComputeCopy | None = None
        self.sharded: ShardedModel | None = None
        read = functools.partial(
            read_weights, directory=self.settings.model_directory, group=self._group, backend=self._backend
        )
        if self._group is not None and (self._ranks > 1 or self.settings.host_step):
            layers = layers_of(model)
            self._fuse(model)
            self.sharded = ShardedModel(
                model,
                layers,
                group=self._group,
                backend=self._backend,
                dtype=self._dtype,
                usable_nbytes=lambda: self._usable_nbytes(vocabulary=self._vocabulary),
                memory=self._memory,
                shard_ranks=self.settings.shard_ranks,
            )
            read(model, reader)
            self.model = model
            return layers
        allocate(model, device=self._backend.device())
        self.model = running = model.to(self._backend.device())
        read(model, reader)
        if self._dtype != torch.float32 and any(one.requires_grad for one in self.model.parameters()):
            self._copy = ComputeCopy(self.model, dtype=self._dtype)
            running = self._copy.modules
        self._fuse(running)
        return layers_of(running)

    def _fuse(self, model: torch.nn.Module) -> None:
        """Let ``model`` run on the backend's fused operations; a compiler fuses by itself."""
        if self._compiler is None and self.settings.fused_kernels:
            device = self._backend.device()
            apply_kernels(model, kernels(), device=device, dtype=self._dtype, level=self._level)

    def _prepare_layers(self, layers: list[torch.nn.Module]) -> None:
        """Compile ``layers`` and the scores, and let layers recompute activations around the compiled code."""
        outer = outermost(layers)
        if self._compiler is not None:
            self._compiler.compile_layers(outer)
            self.scorer.forward = self._compiler.compiled(self.scorer.forward)
            self.scorer.backward = self._compiler.compiled(self.scorer.backward)
        gathers_inside = self.sharded is not None and len(outer) < len(layers)
        communicates = gathers_inside or self._context is not None
        self.checkpointing = ActivationCheckpointing(
            outer,
            setting=self.settings.activation_checkpointing,
            backend=self._backend,
            room_nbytes=lambda: self._usable_nbytes(vocabulary=self._vocabulary) - self.owed_nbytes(),
            # else collectives run before and after a layer
            agree=(lambda number: int(self._reduce([number], op="max")[0])) if communicates else None,
        )

    def owed_nbytes(self) -> int:
        """Return the bytes that this step will still allocate for weights, gradients and the optimizer's state."""
        owed = 0
        if not self.settings.host_step:
            owed += 0 if self.optimizer.state else self._memory.moments
            owed += sum(4 * own_slice(one)[0].numel() for one in self._trained if one.grad is None)
        return owed if self.sharded is None else owed + self.sharded.owed_nbytes

    @property
    def compute_model(self) -> Any:
        """The model to run, with the newest weights in the dtype of the computation; MemoryStateError if offloaded."""
        return self.model if self._copy is None else self._copy.model

    @property
    def data_parallel_rank(self) -> int:
        return 0 if self._group is None else self._group.rank // self._share.count

    @property
    def data_parallel_size(self) -> int:
        return self._ranks // self._share.count

    @contextmanager
    def on_device(self, *, optimizer: bool) -> Iterator[Moved]:
        frees_copy = self._copy is not None and self._copy.masters_offloaded
        with self._offloader.loaded(optimizer=optimizer) as moved:
            try:
                yield moved
            finally:
                if self._copy is not None and frees_copy:
                    self._copy.free()  # before the offload, which gives freed memory back to the device

    def close(self) -> None:
        self._started.close()

    # -- training -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        metrics = super().train_batch(batch, loss=loss)
        if self._compiler is not None:
            metrics["recompilations"] = float(self._compiler.new_graphs())
        return metrics

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        if self._reference is not None:
            with self._reference.on_device(optimizer=False):
                return self._reference.logprobs(batch)
        if self.settings.lora is None:
            return super().reference_logprobs(batch)
        with without_adapter(self.compute_model):
            return self.logprobs(batch)

    def _passes(self, plan: Iterable[MicroBatch]) -> Generator[MicroBatch]:
        return super()._passes(plan if self.sharded is None else self.sharded.passes(plan))

    def _backward(self, part: MicroBatch, *, loss: TokenLoss, tokens: float) -> dict[str, torch.Tensor]:
        with contextlib.nullcontext() if self._compiler is None else explained_compilation():
            return super()._backward(part, loss=loss, tokens=tokens)

    def _scores(self, part: MicroBatch) -> torch.Tensor:
        return self._causal(self.compute_model, part)

    @property
    def _packs(self) -> bool:
        return self._causal.packs

    @property
    def _gradient_scale(self) -> float:
        return self._ranks  # FSDP2 averages gradients over the ranks

    def _clip_gradients(self) -> float:
        gradients = [own_slice(one.grad)[0] for one in self._trained if one.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.sharded is not None:
            assert self._group is not None, "the group of the shards"
            squares = norm.to(self._backend.device()).square()
            self._group.all_reduce(squares)
            norm = (squares / self.sharded.copies).sqrt()
        scale = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
        return norm.item()

    def _update(self, *, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self._mark_changed()

    def _mark_changed(self) -> None:
        if self._copy is not None:
            self._copy.mark_stale()

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _hyperparameters(self) -> dict[str, Any]:
        settings = self.settings
        return {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}

    # -- weights and state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self._saved.parts
        base = self._shards(self._base_parameters(self.compute_model))
        yield from gather_weights(base, self._group, dtype=self._dtype, parts=parts)
        yield from gather_weights(persistent_buffers(self.model), self._group, dtype=None, parts=parts)

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._saved.all_parts(self._described(self._base_parameters(self.model)))
        yield from self._saved.all_parts((name, one.to("meta")) for name, one in persistent_buffers(self.model))

    @torch.no_grad()
    def named_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        adapter = self._shards(self._adapter_parameters(self.compute_model))
        yield from gather_weights(adapter, self._group, dtype=self._dtype)

    def adapter_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._described(self._adapter_parameters(self.model))

    def _base_parameters(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if adapter_name(name) is None:
                yield base_name(name), parameter.detach()

    def _adapter_parameters(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            if (named := adapter_name(name)) is not None:
                yield named, parameter.detach()

    def _described(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            yield name, torch.empty(tensor.shape, dtype=self._dtype, device="meta")

    def _shards(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        return named if self.sharded is None else self.sharded.shards(named)

    def state_dict(self) -> dict[str, Any]:
        model = get_model_state_dict(self.model, options=StateDictOptions(ignore_frozen_params=True))
        names, moments = parameter_names(self.model), {}
        for one in self._trained:  # before the first step the optimizer has no state
            state = self.optimizer.state.get(one) or {key: torch.zeros_like(one) for key in _MOMENTS}
            moments[names[one]] = {key: state[key] for key in _MOMENTS}
        return {"model": model, "optimizer": moments, "updates": self.updates}

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], OffloadedState | None]]:
        with self._offloader.lending():
            yield self.state_dict(), self._offloader

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        options = StateDictOptions(ignore_frozen_params=True, strict=self.base is None)
        set_model_state_dict(self.model, state["model"], options=options)
        names = parameter_names(self.model)
        moments = [state["optimizer"][names[one]] for one in self._trained]
        stepped = {i: {"step": torch.tensor(float(self.updates)), **one} for i, one in enumerate(moments)}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": stepped})
        for group in self.optimizer.param_groups:
            group.update(self._hyperparameters())
        self._mark_changed()

    def export(self, directory: Path) -> None:
        writes, source = self._group is None or self._group.rank == 0, self.settings.model_directory
        if self.settings.lora is not None:
            adapter = {name: tensor.cpu() for name, tensor in self.named_adapter()}
            if writes:
                save_adapter(directory, adapter, config=self.settings.lora.peft_config(), model_directory=source)
            return
        weights = self.named_weights()
        try:
            if writes:
                write_model(directory, self.model, self.weights_metadata(), weights, dtype=self._dtype)
                load_tokenizer(source).save_pretrained(directory)
        finally:
            for _ in weights:  # after an error, too: the other ranks send to the end
                pass


def _agreed_identity(directory: Path, group: Group | None, backend: Backend) -> int:
    """Return the identity of the model in ``directory``; only the first rank reads the files. Collective."""
    identity = model_identity(directory) if group is None or group.rank == 0 else 0
    if group is None:
        return identity
    word = torch.tensor([identity], dtype=torch.int64, device=backend.device())
    group.broadcast(word, src=0)
    return int(word.item())


def _group_of_one(backend: Backend, started: contextlib.ExitStack) -> Group:
    """Return the process's default group; without one, make one of this process, and let ``started`` close it."""
    if torch.distributed.is_initialized():
        return Comm(backend).default_group()
    made = Comm(backend).init_default(store=HashStore(), rank=0, size=1)
    started.callback(made.close)
    return made


@functools.cache
def runs_fused(device_type: str) -> bool:
    """Return whether the fused AdamW takes a right step on the device; this takes one.

    torch names devices whose fused kernels may still be missing, so a name is not enough.
    """
    try:
        weight = torch.nn.Parameter(torch.ones(1, device=device_type))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, fused=True).step()
        return abs(weight.item() - 0.5) < 1e-3
    except (RuntimeError, NotImplementedError):
        return False
