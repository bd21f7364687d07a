from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import hwrl_cpu
from hwrl.comm import Comm, HashStore
from hwrl.errors import DeviceMemoryError, UnsupportedError
from hwrl.interfaces import Backend, BackendInfo, Capability, DeviceMap, torchapi

GENERIC = Backend(BackendInfo(name="xpu", device_type="cpu", description="torch's generic paths"))
HOST = hwrl_cpu.hwrl_create_backend()


@pytest.mark.parametrize("backend", [GENERIC, HOST], ids=repr)
def test_every_capability_has_an_answer_with_a_reason(backend: Backend) -> None:
    for capability in Capability:
        assert backend.supports(capability).reason


def test_a_missing_capability_says_who_lacks_it_and_why() -> None:
    with pytest.raises(UnsupportedError) as caught:
        GENERIC.require(Capability.DEVICE_IPC, needed_for="share a buffer")
    assert str(caught.value).startswith("cannot share a buffer")
    assert "'xpu' lacks 'device_ipc': the backend does not implement it" in caught.value.why


def test_what_is_not_proven_is_usable_and_says_so() -> None:
    GENERIC.require(Capability.STREAMS, needed_for="copy on the side")
    assert GENERIC.supports(Capability.STREAMS).state == "unverified"


@pytest.mark.parametrize("call", [GENERIC.stream, GENERIC.current_stream, GENERIC.event])
def test_a_device_without_streams_says_so_before_one_is_used(call: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedError, match=r"device 'cpu' has no streams(.|\n)*inline ones"):
        call()


def test_streams_and_events_are_torchs_own_where_an_engine_replaced_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend sets ``torch.Event = torch.npu.Event`` for the whole process, torchada and transfer_to_npu more."""

    class OfAVendor:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            raise AssertionError("this class takes no device")

    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch, name, OfAVendor)
    monkeypatch.setattr(torchapi, "require_streams", lambda _: None)  # the host has none, but torch makes the objects
    monkeypatch.setattr(GENERIC, "current_index", lambda: 0)
    for made, own in ((GENERIC.event(timing=True), torch._C.Event), (GENERIC.stream(), torch._C.Stream)):
        assert type(made) is own


def test_the_collective_library_comes_from_torch() -> None:
    assert GENERIC.comm_library() == torch.distributed.get_default_backend_for_device("cpu")


def test_a_device_without_a_collective_library_says_so_and_forms_groups_on_the_host() -> None:
    lone = Backend(BackendInfo(name="lone", device_type="meta", description="torch knows no library for it"))
    support = lone.supports(Capability.COLLECTIVES)
    assert not support.usable and "no collective library for device 'meta'" in support.reason
    with Comm(lone).standalone_group(HashStore(), rank=0, size=1, name="alone") as group:
        assert (group.rank, group.size) == (0, 1)
    assert GENERIC.supports(Capability.COLLECTIVES).usable


def test_what_does_not_fit_is_told_with_the_devices_numbers() -> None:
    with pytest.raises(DeviceMemoryError) as caught, HOST.allocating("the optimizer's state"):
        raise torch.OutOfMemoryError("Tried to allocate 80.00 GiB.\nSee the documentation")
    assert caught.value.what == "the optimizer's state does not fit in the memory of cpu"
    assert re.search(r"of its [\d.]+ GiB are free; tensors of this process hold [\d.]+ GiB", caught.value.why)
    assert caught.value.why.endswith("torch said: Tried to allocate 80.00 GiB.")
    with pytest.raises(DeviceMemoryError, match="torch said: nothing"), HOST.allocating("the model"):
        raise torch.OutOfMemoryError
    with pytest.raises(ValueError), HOST.allocating("nothing"):
        raise ValueError


_DEVICE = """
import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from hwrl.interfaces import Backend, BackendInfo, fill_stream_functions
from hwrl.errors import DeviceMemoryError, UnsupportedError

class Module(_DummyBackendModule):
    pass

def says(call):
    try:
        return call()
    except UnsupportedError as error:
        return f"{error.what}: {error.why}"

_setup_privateuseone_for_python_backend("acme", backend_module=Module())
backend = Backend(BackendInfo("acme", "acme", "a device that torch computes with, and knows little of"))
for call in (backend.memory_info, backend.synchronize, backend.empty_cache, backend.rng_state):
    said = says(call)
    if said is None and call == backend.synchronize and torch.__version__ < "2.12":
        continue  # torch 2.10 and 2.11 do nothing there
    assert "device 'acme' has no" in said, said
assert "Allocator for acme is not a DeviceAllocator" in says(backend.empty_cache)
assert "no torch.acme.get_rng_state" in says(backend.rng_state)
Module.synchronize = lambda self: None
backend.synchronize()
torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda: "asked"
torch.accelerator.memory_stats = lambda: {"allocated_bytes.all.current": 3}
torch.accelerator.get_memory_info = lambda: (1, 2)
assert backend.memory_info().allocated_nbytes == 3 and backend.memory_info().free_nbytes == 1
backend.empty_cache()
asked = []
torch._C._accelerator_isAllocatorInitialized = lambda: True
torch.accelerator.empty_cache, Module.empty_cache = lambda: asked.append("general"), lambda self: asked.append("own")
backend.empty_cache()
def gap():
    raise RuntimeError("Allocator for acme is not a DeviceAllocator")
torch.accelerator.empty_cache = gap
backend.empty_cache()
torch.accelerator.empty_cache, torch._C._accelerator_isAllocatorInitialized = lambda: None, lambda: False
backend.empty_cache()  # an older torch: it does nothing, without an error
assert asked == ["general", "own", "own"], asked
torch.accelerator.set_device_index, torch.accelerator.device_count = asked.append, lambda: 5
backend.set_device(0)
assert asked[-1] == 0, "the module has no set_device"
assert backend.device_count() == 1, "the module's own comes first"
assert "device 'acme' has no page-locked host memory" in says(lambda: backend.pinned_empty(8))
class Inline(Backend):
    stream = current_stream = event = lambda self, **_: "inline"
fill_stream_functions(Inline(backend.info))
assert torch.acme.Stream(priority=-1) == torch.acme.Event() == torch.acme.current_stream() == "inline"
assert all(hasattr(torch.acme, name) for name in ("Stream", "Event", "stream", "current_stream"))
assert "torch has no device 'unheard'" in says(Backend(BackendInfo("unheard", "unheard", "")).device_count)
del torch.accelerator.get_memory_info
assert "no torch.accelerator.get_memory_info" in says(backend.memory_info)
try:
    with backend.allocating("the model"):
        raise torch.OutOfMemoryError("full")
except DeviceMemoryError as error:
    assert "its free memory is not known" in error.why and "torch said: full" in error.why, error
"""


def test_a_device_of_which_torch_knows_little_is_asked_where_it_answers_or_told_to_lack_it() -> None:
    ended = subprocess.run([sys.executable, "-c", _DEVICE], text=True, capture_output=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr


class Driverless(hwrl_cpu.CpuBackend):
    devices = DeviceMap(visible_variable="CARDS")

    def device_count(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ({}, "the driver shows none (nothing hides them)"),
        ({"CARDS": "7"}, "the driver shows none (CARDS='7')"),
        ({"CARDS": ""}, "CARDS='' hides every device from this process"),
        ({"CARDS": "x"}, "CARDS='x' cannot be read: it must be device numbers separated by commas; set it like"),
    ],
)
def test_a_process_without_devices_is_told_why(
    monkeypatch: pytest.MonkeyPatch, shown: dict[str, str], said: str
) -> None:
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    assert said in Driverless(hwrl_cpu.INFO).why_no_device()
    assert HOST.why_no_device() == ""


def test_the_host_has_one_device() -> None:
    assert HOST.device_count() == 1
    HOST.set_device(0)
    with pytest.raises(Exception, match="there is no CPU device 1"):
        HOST.set_device(1)


def test_a_range_shows_in_the_profile() -> None:
    with torch.profiler.profile() as profile, HOST.range("a named range"):
        torch.ones(2)
    assert "a named range" in {event.key for event in profile.key_averages()}
