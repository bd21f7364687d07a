"""The FSDP2 train engine: any ``AutoModelForCausalLM`` directory, on one rank or sharded over several."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from hwrl.discovery import kernels
from hwrl.interfaces import Backend, Batch, EngineSettings, LoraSettings, Moved, OffloadedState, TokenLoss
from hwrl.lora import adapter_name, add_adapter, base_name, save_adapter
from hwrl.memory import Offloader
from hwrl.models import build_model, load_model, load_tokenizer, model_identity, use_working_experts
from hwrl.saved_names import SavedNames
from hwrl.train.activations import ActivationCheckpointing
from hwrl.train.adamw import build_adamw
from hwrl.train.causal import CausalModel
from hwrl.train.compiling import Compiler, explained_compilation, wants_compilation
from hwrl.train.compute_copy import ComputeCopy
from hwrl.train.kernels import apply_kernels
from hwrl.train.packing import MicroBatch
from hwrl.train.policy import PolicyEngine
from hwrl.train.sharding import ShardedModel, layers_of, outermost
from hwrl.weights import gather_weights

if TYPE_CHECKING:
    from hwrl.comm import Group

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpEngine(PolicyEngine):
    """Trains the model in ``settings.model_directory``, or an adapter on it, with AdamW.

    ``group`` is the default process group of the training ranks (None: one rank; the model is then not wrapped).
    :attr:`model` has the float32 parameters. On one rank with another ``dtype``, a copy in that dtype computes; on
    several, FSDP2 casts. Gradients are float32. The model is always in evaluation mode: dropout would add noise to
    the ratio to the behaviour policy.
    """

    def __init__(self, settings: EngineSettings, *, backend: Backend, group: Group | None) -> None:
        super().__init__(settings, backend=backend, group=group)
        self._dtype = settings.dtype
        self._level = logging.WARNING if group is None or group.rank == 0 else logging.DEBUG  # a run is told once
        make = load_model if group is None or group.rank == 0 else build_model  # the first rank sends shards
        model = make(settings.model_directory, dtype=torch.float32).eval()
        use_working_experts(model, device=backend.device(), dtype=settings.dtype)
        self._saved = SavedNames.of(model)
        if settings.lora is not None:
            self.base = model_identity(settings.model_directory)
            model = add_adapter(model, settings.lora, seed=settings.seed)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self._compiler = self._make_compiler()
        layers = self._place(model)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._state_nbytes = sum(4 * _local(parameter).numel() for parameter in self._trained)
        self.optimizer = build_adamw(self._trained, device=backend.device(), **self._hyperparameters())
        self._causal = CausalModel(backend=backend, scorer=self.scorer, level=self._level)
        self._causal.prove(self.compute_model, dtype=settings.dtype)
        if self._sharded is not None:
            self._sharded.reshard()
        self._prepare_layers(layers)
        self._offloader = Offloader(self.model, self.optimizer, backend=backend)
        if settings.param_offload and self._copy is not None:
            self._copy.free()
        self._offloader.offload(params=settings.param_offload, optimizer=settings.optimizer_offload)

    def _place(self, model: Any) -> list[torch.nn.Module]:
        """Put ``model`` on the device: whole, with a copy in ``dtype``, or a shard; return the layers that run."""
        self._copy: ComputeCopy | None = None
        self._sharded: ShardedModel | None = None
        if self._group is not None and self._ranks > 1:
            layers = layers_of(model)
            self._fuse(model)
            self._sharded = ShardedModel(
                model,
                layers,
                group=self._group,
                backend=self._backend,
                dtype=self._dtype,
                usable_nbytes=lambda: self._usable_nbytes(vocabulary=self._vocabulary),
            )
            self.model = model
            return layers
        self.model = running = model.to(self._backend.device())
        if self._dtype != torch.float32:
            self._copy = ComputeCopy(self.model, dtype=self._dtype)
            running = self._copy.modules
        self._fuse(running)
        return layers_of(running)

    def _fuse(self, model: torch.nn.Module) -> None:
        """Let ``model`` run on the backend's fused operations; a compiler fuses by itself."""
        if self._compiler is None and self.settings.fused_kernels:
            device = self._backend.device()
            apply_kernels(model, kernels(), device=device, dtype=self._dtype, level=self._level)

    def _make_compiler(self) -> Compiler | None:
        setting = self.settings.compile
        if not wants_compilation(self._backend, setting=setting):
            return None
        return Compiler(required=setting is True, level=self._level)

    def _prepare_layers(self, layers: list[torch.nn.Module]) -> None:
        """Compile ``layers`` and the scores, and let layers recompute activations around the compiled code."""
        outer = outermost(layers)
        if self._compiler is not None:
            self._compiler.compile_layers(outer)
            self.scorer.forward = self._compiler.compiled(self.scorer.forward)
            self.scorer.backward = self._compiler.compiled(self.scorer.backward)
        gathers_inside = self._sharded is not None and len(outer) < len(layers)
        self._checkpointing = ActivationCheckpointing(
            outer,
            setting=self.settings.activation_checkpointing,
            backend=self._backend,
            room_nbytes=lambda: self._usable_nbytes(vocabulary=self._vocabulary) - self._owed_nbytes(),
            agree=self._largest if gathers_inside else None,  # else the ranks gather a layer's weights around it
        )

    def _largest(self, number: int) -> int:
        return int(self._reduce([number], op="max")[0])

    def _owed_nbytes(self) -> int:
        """Return the bytes that this step will still allocate for weights, gradients and the optimizer's state."""
        owed = 0 if self.optimizer.state else 2 * self._state_nbytes
        owed += sum(4 * _local(parameter).numel() for parameter in self._trained if parameter.grad is None)
        return owed if self._sharded is None else owed + self._sharded.owed_nbytes

    @property
    def compute_model(self) -> Any:
        """The model to run, with the newest weights in the dtype of the computation; MemoryStateError if offloaded."""
        return self.model if self._copy is None else self._copy.model

    @property
    def data_parallel_rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    @property
    def data_parallel_size(self) -> int:
        return self._ranks

    @contextmanager
    def on_device(self, *, optimizer: bool) -> Iterator[Moved]:
        frees_copy = self._copy is not None and self._copy.masters_offloaded
        with self._offloader.loaded(optimizer=optimizer) as moved:
            try:
                yield moved
            finally:
                if self._copy is not None and frees_copy:
                    self._copy.free()  # before the offload, which gives freed memory back to the device

    # -- training -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        metrics = super().train_batch(batch, loss=loss)
        if self._compiler is not None:
            metrics["recompilations"] = float(self._compiler.new_graphs())
        return metrics

    def _passes(self, plan: Iterable[MicroBatch]) -> Generator[MicroBatch]:
        return super()._passes(plan if self._sharded is None else self._sharded.passes(plan))

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
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        return _full(norm).item()

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
        whole = gather_weights(self._base_parameters(self.compute_model), self._group, dtype=self._dtype)
        yield from self._saved.all_parts(whole)
        if self._group is None or self._group.rank == 0:
            yield from self._saved.all_parts(self._buffers())

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._saved.all_parts(self._described(self._base_parameters(self.model)))
        yield from self._saved.all_parts((name, buffer.to("meta")) for name, buffer in self._buffers())

    @torch.no_grad()
    def named_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from gather_weights(self._adapter_parameters(self.compute_model), self._group, dtype=self._dtype)

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

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers; every rank has them whole."""
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = self._model_and_optimizer()
        moments = {name: {key: state[key] for key in _MOMENTS} for name, state in optimizer["state"].items()}
        return {"model": model, "optimizer": moments, "updates": self.updates}

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], OffloadedState | None]]:
        if not self.optimizer.state:  # torch takes an empty step to make a state
            with super().saved_state() as saved:
                yield saved
            return
        with self._offloader.lending():
            yield self.state_dict(), self._offloader

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        _, optimizer = self._model_and_optimizer()
        for name, moments in state["optimizer"].items():
            optimizer["state"][name].update(moments, step=torch.tensor(float(self.updates)))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=optimizer,
            options=StateDictOptions(ignore_frozen_params=True, strict=self.base is None),
        )
        for group in self.optimizer.param_groups:
            group.update(self._hyperparameters())
        self._mark_changed()

    def _model_and_optimizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        before_first_step = not self.optimizer.state
        found = get_state_dict(self.model, self.optimizer, options=StateDictOptions(ignore_frozen_params=True))
        if before_first_step:  # torch took an empty step to make a state
            for state in self.optimizer.state.values():
                state["step"].fill_(self.updates)
        return found

    def export(self, directory: Path) -> None:
        if self.settings.lora is None:
            self._export_model(directory)
        else:
            self._export_adapter(directory, self.settings.lora)

    def _export_adapter(self, directory: Path, lora: LoraSettings) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.named_adapter()}
        if self._group is None or self._group.rank == 0:
            save_adapter(directory, weights, config=lora.peft_config(), model_directory=self.settings.model_directory)

    def _export_model(self, directory: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(self.model, options=options)
        if self._group is not None and self._group.rank != 0:
            return
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            weights[name] = weights[name].to(self._dtype)
        self.model.save_pretrained(directory, state_dict=weights)
        self.model.config.dtype = self._dtype  # save_pretrained wrote the parameters' dtype in training
        self.model.config.save_pretrained(directory)
        load_tokenizer(self.settings.model_directory).save_pretrained(directory)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
