"""The random-number generators of one process, as JSON."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from hwrl.interfaces import Backend

_log = logging.getLogger(__name__)


def rng_state(backend: Backend) -> dict[str, Any]:
    """Return the state of the device's generator, torch's on the host, numpy's global one and Python's."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "device": backend.rng_state().tolist(),
        "device_type": backend.info.device_type,
        "host": torch.get_rng_state().tolist(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": [version, list(words), gauss],
    }


def set_rng_state(state: dict[str, Any], backend: Backend) -> None:
    """Restore what :func:`rng_state` returned.

    On another kind of device, whose generator has nothing in common with the saved one, the device's part is left as it
    is, with a line in the log.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["host"], dtype=torch.uint8))
    saved_on, here = state["device_type"], backend.info.device_type
    if saved_on == here:
        backend.set_rng_state(torch.tensor(state["device"], dtype=torch.uint8))
    else:
        _log.warning("random numbers on the device begin afresh: they were saved on %r, and this is %r", saved_on, here)
