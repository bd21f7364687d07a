"""The random-number generators of one process, as JSON: for ``rank_extra`` of a save."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from hwrl.discovery import backend_or_default
from hwrl.interfaces import Backend

_log = logging.getLogger(__name__)


def rng_state(backend: Backend | None = None) -> dict[str, Any]:
    """Return the state of the device's generator, torch's on the host, numpy's global one and Python's.

    Without ``backend``, the device is that of the chosen backend. The result is JSON, about 50 kB of it.
    """
    backend = backend_or_default(backend)
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "device": backend.rng_state().tolist(),
        "device_type": backend.info.device_type,
        "host": torch.get_rng_state().tolist(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": [version, list(words), gauss],
    }


def set_rng_state(state: dict[str, Any], backend: Backend | None = None) -> None:
    """Restore what :func:`rng_state` returned.

    The device's generator is restored only on the same type of device. Otherwise it stays as it is, and a warning is
    logged.
    """
    backend = backend_or_default(backend)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["host"], dtype=torch.uint8))
    saved_on, device_type = state["device_type"], backend.info.device_type
    if saved_on == device_type:
        backend.set_rng_state(torch.tensor(state["device"], dtype=torch.uint8))
    else:
        _log.warning("the device's random numbers start anew: they were saved on %r, this is %r", saved_on, device_type)
