"""The FSDP2 train engine: any ``AutoModelForCausalLM`` directory, on one rank or sharded over several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from hwrl.errors import EngineError
from hwrl.interfaces import Backend, EngineSettings, LoraSettings, Moved, OffloadedState
from hwrl.lora import adapter_name, add_adapter, base_name, save_adapter
from hwrl.memory import Offloader
from hwrl.models import build_model, load_model, load_tokenizer, model_identity
from hwrl.train.causal import CausalModel
from hwrl.train.packing import MicroBatch
from hwrl.train.policy import PolicyEngine, recompute
from hwrl.weights import gather_weights

if TYPE_CHECKING:
    from hwrl.comm import Group


_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpEngine(PolicyEngine):
    """Trains the model in ``settings.model_directory``, or an adapter on it, with AdamW.

    ``group`` is the default process group of the training ranks (None: one rank; the model is then not wrapped).
    Gradients are reduced in float32. The model is always in evaluation mode: dropout would add noise to the ratio to
    the behaviour policy.
    """

    def __init__(self, settings: EngineSettings, *, backend: Backend, group: Group | None) -> None:
        super().__init__(settings, backend=backend, group=group)
        self._dtype = settings.dtype
        make = load_model if group is None or group.rank == 0 else build_model  # the first rank sends shards
        model = make(settings.model_directory, dtype=torch.float32).eval()
        if settings.lora is not None:
            self.base = model_identity(settings.model_directory)
            model = add_adapter(model, settings.lora, seed=settings.seed)
        layers = _layers(model)
        if settings.activation_checkpointing:
            recompute(layers)
        self.model = _shard(model, layers, backend, group, settings.dtype)
        self._causal = CausalModel(backend=backend, scorer=self.scorer)
        with self._computing():
            self._causal.prove(self.model, dtype=settings.dtype)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, **self._hyperparameters())
        self._offloader = Offloader(self.model, self.optimizer, backend=backend)
        self._offloader.offload(params=settings.param_offload, optimizer=settings.optimizer_offload)

    @property
    def data_parallel_rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    @property
    def data_parallel_size(self) -> int:
        return self._ranks

    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        return self._offloader.loaded(optimizer=optimizer)

    # -- training -----------------------------------------------------------------------------------------------

    def _scores(self, part: MicroBatch) -> torch.Tensor:
        with self._computing():
            return self._causal(self.model, part)

    @property
    def _packs(self) -> bool:
        return self._causal.packs

    def _computing(self) -> torch.autocast:
        autocast = self._ranks == 1 and self._dtype != torch.float32  # on several ranks FSDP2 casts
        return torch.autocast(self._backend.info.device_type, dtype=self._dtype, enabled=autocast)

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

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _hyperparameters(self) -> dict[str, Any]:
        settings = self.settings
        return {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}

    # -- weights and state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from gather_weights(self._base_parameters(), self._group, dtype=self._dtype)
        if self._group is None or self._group.rank == 0:
            yield from self._buffers()

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._described(self._base_parameters())
        for name, buffer in self._buffers():
            yield name, buffer.to("meta")

    @torch.no_grad()
    def named_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from gather_weights(self._adapter_parameters(), self._group, dtype=self._dtype)

    def adapter_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._described(self._adapter_parameters())

    def _base_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if adapter_name(name) is None:
                yield base_name(name), parameter.detach()

    def _adapter_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if (named := adapter_name(name)) is not None:
                yield named, parameter.detach()

    def _described(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            yield name, torch.empty(tensor.shape, dtype=self._dtype, device="meta")

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers; every rank has them whole."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        yield from ((name, tensor) for name, tensor in self.model.state_dict().items() if name not in parameters)

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


def _layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers of ``model``, inner ones first; EngineError if transformers does not name their class."""
    kinds = set(model._no_split_modules or ())  # accelerate and others use it, too
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise EngineError(
            f"a {type(model).__name__} cannot be trained layer by layer",
            why=f"none of its modules has a class of its _no_split_modules: {sorted(kinds)}",
            fix="name the class of its layers in _no_split_modules of the model's class",
        )
    return layers[::-1]


def _shard(model: Any, layers: list[torch.nn.Module], backend: Backend, group: Group | None, dtype: torch.dtype) -> Any:
    """Return ``model`` on the device; on several ranks, sharded layer by layer with the first rank's weights."""
    if group is None or group.size == 1:
        return model.to(backend.device())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    weights = model.state_dict() if group.rank == 0 else {}
    mesh = init_device_mesh(backend.info.device_type, (group.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=broadcast)
    return model


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
