"""Read this rank's parts of the weights from the model's files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from hwrl.model_files import ModelFiles
from hwrl.models import build_meta_model, load_model
from hwrl.safetensors_files import TensorFiles
from hwrl_megatron.weights import MappedWeight

_log = logging.getLogger("hwrl.train")


@torch.no_grad()
def load_weights(weights: Sequence[MappedWeight], directory: Path) -> None:
    """Fill the parameters of ``weights`` from ``directory``; only their parts are read, one after the other.

    Raises DataError if the files do not fit the model in its config.json. Files that cannot be read by parts, such as
    those of other formats, are loaded whole, with a warning.
    """
    model = build_meta_model(directory, dtype=torch.float32)
    files = ModelFiles(directory, model)
    if files.why_whole is not None:
        _log.warning("each rank loads all weights of %s: %s", directory, files.why_whole)
        whole = load_model(directory, dtype=torch.float32).state_dict()
        for weight in weights:
            weight.load(whole[weight.saved.own_name][weight.own_slices()])
        return
    experts = TensorFiles.of(directory)
    assert experts is not None, "the files can be read by parts"
    for weight in weights:
        saved = weight.saved
        if saved.own_name != saved.name:  # transformers packs experts: read one of them
            weight.load(experts.read(saved.name, weight.slices()))
            continue
        part, dim = torch.empty(weight.local_shape(), dtype=weight.view.dtype), saved.dim or 0
        files.read(saved.name, part, dim=dim, start=weight.slices()[dim].start)
        weight.load(part)
    files.close()
    experts.close()
