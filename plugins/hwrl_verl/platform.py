"""A platform for verl, ``hwrl``: verl uses the device of this process's backend.

verl imports this module by the entry point ``verl.plugins``, and logs an error of the import at debug level only. With
``VERL_USE_EXTERNAL_MODULES=hwrl_verl.platform`` such an error ends verl.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from hwrl import get_backend
from hwrl.comm import collectives_of
from hwrl.interfaces import Backend, Capability


def _method(name: str) -> Callable[..., Any]:
    """Return a method that calls the backend's method ``name``; a dot in it leads to a part of the backend."""
    return lambda self, *args: operator.attrgetter(name)(self._backend)(*args)


@PlatformRegistry.register(platform="hwrl")
class HwrlPlatform(PlatformBase):  # type: ignore[misc] # verl's types are not followed
    """Any backend of hwrl as a device of verl. Only ``VERL_PLATFORM=hwrl`` selects it; verl's detection does not."""

    _backend = functools.cached_property(lambda self: get_backend())
    device_name = property(lambda self: self._backend.info.device_type)
    vendor_name = property(lambda self: self._backend.info.name)
    device_module = functools.cached_property(lambda self: _DeviceModule(self._backend))
    device_count = _method("device_count")
    set_device = _method("set_device")
    empty_cache = _method("empty_cache")
    manual_seed = _method("seed")
    nvtx_range = _method("range")
    ray_resource_options = _method("devices.ray_options")

    def communication_backend_name(self) -> str:
        """Return the collective library of the device; if it has none, that of hwrl's staged groups."""
        if self._backend.supports(Capability.COLLECTIVES).usable:
            return self._backend.comm_library()
        return collectives_of(self._backend).group_library()

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False. Otherwise verl's detection would choose this platform without VERL_PLATFORM."""
        return False

    def is_available(self) -> bool:
        return self._backend.device_count() > 0

    def current_device(self) -> Any:
        """Return the index of the current device; its name if torch would take an index for another device."""
        accelerator = torch.accelerator.current_accelerator()
        served = accelerator is not None and accelerator.type == self.device_name
        return self._backend.current_index() if served else self.device_name

    def synchronize(self, device_index: int | None = None) -> None:
        self.device_module.synchronize(device_index)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)  # it seeds all devices

    def set_allocator_settings(self, settings: str) -> None:
        """Apply ``settings`` if the device's allocator takes settings at run time, otherwise do nothing."""
        memory = getattr(self._backend.device_module, "memory", None)
        getattr(memory, "_set_allocator_settings", _nothing)(settings)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        find = getattr(self._backend.device_module, "get_device_capability", _nothing)
        found = find(device_index) if self.is_available() else None
        return found if isinstance(found, tuple) else (None, None)

    def visible_devices_envvar(self) -> str:
        return self._backend.devices.visible_variable or "HWRL_VISIBLE_DEVICES"

    def profiler_start(self) -> None:
        getattr(getattr(self._backend.device_module, "profiler", None), "start", _nothing)()

    def profiler_stop(self) -> None:
        getattr(getattr(self._backend.device_module, "profiler", None), "stop", _nothing)()

    def ray_resource_name(self) -> str:
        return self._backend.devices.ray_resource or "CPU"

    def ray_noset_envvars(self) -> list[str]:
        variable = self._backend.devices.visible_variable
        return [f"RAY_EXPERIMENTAL_NOSET_{variable}"] if variable else []

    def is_ipc_supported(self) -> bool:
        """Return whether other processes can open this device's memory; verl does so by the device's index."""
        return self._backend.supports(Capability.DEVICE_IPC).usable and isinstance(self.current_device(), int)

    def rollout_env_vars(self) -> dict[str, str]:
        """Return the variables that verl's own platform of this device sets for rollout engines; {} without one."""
        for name in PlatformRegistry.registered_names():
            own = PlatformRegistry.get(name)()
            if name != "hwrl" and own.device_name == self.device_name:
                return dict(own.rollout_env_vars())
        return {}

    def cudart(self) -> Any:
        return getattr(self._backend.device_module, "cudart", _nothing)()


class _DeviceModule:
    """torch's module of the device. The backend does the functions of ``_FROM_BACKEND`` that the module lacks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name in _FROM_BACKEND and not hasattr(self._backend.device_module, name):
            return functools.partial(_FROM_BACKEND[name], self._backend)
        return getattr(self._backend.device_module, name)


_FROM_BACKEND: dict[str, Callable[..., Any]] = {
    "empty_cache": lambda backend: backend.empty_cache(),
    "get_device_name": lambda backend, *_: backend.info.description,
    "get_rng_state": lambda backend, *_: backend.rng_state(),
    "ipc_collect": lambda backend: None,
    "max_memory_allocated": lambda backend, *_: backend.memory_info().peak_nbytes,
    "max_memory_reserved": lambda backend, *_: backend.memory_info().peak_nbytes,
    "mem_get_info": lambda backend, *_: (backend.memory_info().free_nbytes, backend.memory_info().total_nbytes),
    "memory_allocated": lambda backend, *_: backend.memory_info().allocated_nbytes,
    "memory_reserved": lambda backend, *_: backend.memory_info().reserved_nbytes,
    "set_rng_state": lambda backend, state, *_: backend.set_rng_state(state),
    "synchronize": lambda backend, *_: backend.synchronize(),
}


def _nothing(*_: Any) -> None:
    """Stand in for a function that this device's module lacks."""


if os.environ.get("VERL_ENGINE_VENDOR") == "hwrl":  # only then, because it imports verl's training engines for seconds
    import hwrl_verl.engine  # noqa: F401 - it registers itself
