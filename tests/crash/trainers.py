"""The trainers of the matrix: their state is divided over ranks as in training, by FSDP2 or by Megatron-core."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo  # fully_shard imports it when it is first called: once here, and not in every life
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hwrl
from hwrl.comm import Comm, Group, HashStore
from hwrl.interfaces import EngineSettings
from hwrl_cpu import INFO, CpuBackend
from hwrl_megatron import hwrl_train_engine, prepare_process

BACKEND = CpuBackend(INFO)
ROWS = 5  # odd: the ranks' shards differ in size


class Trainer(Protocol):
    """A trainer on one rank; the tensors of its state are its memory."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


MakeTrainer = Callable[[Group | None], AbstractContextManager[Trainer]]
"""Makes a trainer on the ranks of a group, on one rank without."""


@contextlib.contextmanager
def whole(group: Group | None) -> Iterator[Trainer]:
    """A layer, on one rank and without any group."""
    yield _Plain(nn.Linear(3, ROWS))


@contextlib.contextmanager
def fsdp2(group: Group | None) -> Iterator[Trainer]:
    """The same as DTensors: ``fully_shard`` split them over the ranks, be it only one."""
    with contextlib.ExitStack() as started:
        ranks = group or started.enter_context(Comm(BACKEND).init_default(store=HashStore(), rank=0, size=1))
        model = nn.Linear(3, ROWS)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.size,)))
        yield _Plain(model)


class _Plain:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self._model)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        set_model_state_dict(self._model, state["model"])


@dataclass(frozen=True)
class Megatron:
    """hwrl's Megatron engine, on the model in a directory from :func:`write_model`."""

    model: Path
    tensor_parallel: int = 1

    @contextlib.contextmanager
    def __call__(self, group: Group | None) -> Iterator[Trainer]:
        settings = EngineSettings(model_directory=self.model, learning_rate=1e-3, total_steps=1, micro_batch_tokens=8)
        options = {"tensor_parallel": self.tensor_parallel}
        with contextlib.closing(hwrl_train_engine(settings, options, BACKEND, group)) as engine:
            yield engine


def write_model(directory: Path) -> Path:
    """Write the smallest model for two tensor-parallel ranks; have this process import the modules that load it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from hwrl.models import load_model

    logging.disable_progress_bar()  # it runs in a thread
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    load_model(directory, dtype=torch.float32)
    hwrl.set_backend("cpu")
    prepare_process()
    importlib.import_module("hwrl_megatron.engine")
    return directory
