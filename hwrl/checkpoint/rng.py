"""The state of a process's random-number generators as JSON: :func:`rng_state`, for ``rank_extra`` of a save."""

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
    """Return the states of four generators: the device's, torch's on the host, numpy's global one, and Python's.

    Without ``backend``, the chosen backend's device is used. The result is about 50 kB of JSON.
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
    """Restore the generators from the result of :func:`rng_state`.

    The device's generator is restored only on the type of device that saved it. On another type it is not changed, and
    a warning is logged.
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
        _log.warning("the device's generator is not restored: it was saved on %r and this is %r", saved_on, device_type)
