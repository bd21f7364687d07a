"""Read this rank's parts of the weights from the model's files."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hwrl.interfaces import Backend
from hwrl.model_files import ModelFiles
from hwrl.train import open_model, read_on_all_ranks
from hwrl_megatron.layout import SavedTensor
from hwrl_megatron.weights import MappedWeight

if TYPE_CHECKING:
    from hwrl.comm import Group


@torch.no_grad()
def load_weights(
    weights: Sequence[MappedWeight],
    saved: Sequence[SavedTensor],
    directory: Path,
    *,
    group: Group | None,
    backend: Backend,
) -> None:
    """Fill the parameters of ``weights`` from ``directory``. Each rank reads only its parts, one after the other.

    ``saved`` has all tensors of the model. Collective; raises DataError on all ranks if the files do not fit the model
    in its config.json. If the files cannot be read by parts, for example in another format, the first rank loads them
    and broadcasts a tensor at a time; a log line says so.
    """
    level = logging.WARNING if group is None or group.rank == 0 else logging.DEBUG  # one warning for a run
    _, reader = open_model(directory, group=group, backend=backend, level=level)
    if isinstance(reader, ModelFiles):
        read = functools.partial(_read_parts, weights, reader)
        read_on_all_ranks(read, directory=directory, group=group, backend=backend)
        return
    for name, shape in {one.own_name: one.own_shape for one in saved}.items():
        whole = torch.empty(shape)
        reader.read(name, whole)
        for weight in weights:
            if weight.saved.own_name == name:
                weight.load(whole[weight.own_slices()])


def _read_parts(weights: Sequence[MappedWeight], files: ModelFiles) -> None:
    for weight in weights:
        saved = weight.saved
        if saved.own_name != saved.name:  # one expert of a tensor that transformers packs
            weight.load(files.read_saved(saved.name, weight.slices()))
            continue
        part, dim = torch.empty(weight.local_shape(), dtype=weight.view.dtype), saved.dim or 0
        files.read(saved.name, part, dim=dim, start=weight.slices()[dim].start)
        weight.load(part)
    files.close()
