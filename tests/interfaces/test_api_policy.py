"""The API policy of docs/requirements.md: nothing of version 1.0 is removed while the major version is 1."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from hwrl import interfaces
from hwrl.discovery import hookspecs
from hwrl.interfaces import API_VERSION, Backend, Capability

HOOKS = {
    "hwrl_backend_info": "",
    "hwrl_bootstrap": "framework",
    "hwrl_check_engine": "asked_by options",
    "hwrl_commands": "",
    "hwrl_create_backend": "",
    "hwrl_doctor": "context",
    "hwrl_engine_args": "framework",
    "hwrl_engine_memory": "settings options ranks device_nbytes",
    "hwrl_kernels": "",
    "hwrl_probe": "context",
    "hwrl_process_env": "role env exports_memory shares_device devices",
    "hwrl_rollout_engine": "settings options backend",
    "hwrl_tracker": "options",
    "hwrl_train_engine": "settings options backend group",
}
METHODS = """abort_process_group allocating await_work comm_library create_process_group current_index current_stream
device device_count device_module device_uuid devices empty_cache event export_memory group_library library_timeout
memory_info open_memory peak_flops pinned_empty range register_host_memory require rng_state seed set_device
set_rng_state stream supports synchronize unregister_host_memory varlen_attention why_no_device"""
CAPABILITIES = """streams pinned_memory registered_memory memory_stats collectives comm_abort shared_device_groups
device_ipc varlen_attention compiled_training"""
FIELDS = {
    "BackendInfo": "name device_type description api fallback",
    "DeviceMap": "visible_variable ray_resource",
    "Finding": "level message fix",
    "MemoryInfo": "free_nbytes total_nbytes allocated_nbytes reserved_nbytes peak_nbytes",
    "ProbeResult": "answer reason evidence rank",
    "Support": "state reason",
}

pytestmark = pytest.mark.skipif(API_VERSION[0] != 1, reason="another major version may remove anything")


@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_loses_an_argument(hook: str) -> None:
    assert set(HOOKS[hook].split()) <= set(inspect.signature(getattr(hookspecs, hook)).parameters)


def test_no_method_and_no_capability_goes_away() -> None:
    assert [name for name in METHODS.split() if not hasattr(Backend, name)] == []
    assert set(CAPABILITIES.split()) <= {one.value for one in Capability}


@pytest.mark.parametrize("name", FIELDS)
def test_no_class_loses_a_field_or_needs_a_new_one(name: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(getattr(interfaces, name))}
    known = set(FIELDS[name].split())
    assert known <= set(fields)
    assert [new for new in set(fields) - known if fields[new].default is dataclasses.MISSING] == []
