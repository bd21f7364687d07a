from __future__ import annotations

import re

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import hwrl_cpu
from hwrl.backend import Backend, BackendInfo, Capability
from hwrl.comm import Comm
from hwrl.errors import DeviceMemoryError, UnsupportedError

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


def test_the_collective_library_comes_from_torch() -> None:
    assert GENERIC.comm_library() == torch.distributed.get_default_backend_for_device("cpu")


def test_a_device_without_a_collective_library_says_so_and_forms_no_group() -> None:
    lone = Backend(BackendInfo(name="lone", device_type="meta", description="torch knows no library for it"))
    support = lone.supports(Capability.COLLECTIVES)
    assert not support.usable and "no collective library for device 'meta'" in support.reason
    with pytest.raises(UnsupportedError, match="'lone' lacks 'collectives'"):
        Comm(lone).standalone_group(HashStore(), rank=0, size=1, name="alone")
    assert GENERIC.supports(Capability.COLLECTIVES).usable


def test_what_does_not_fit_is_told_with_the_devices_numbers() -> None:
    with pytest.raises(DeviceMemoryError) as caught, HOST.allocating("the optimizer's state"):
        raise torch.OutOfMemoryError("Tried to allocate 80.00 GiB.\nSee the documentation")
    assert caught.value.what == "the optimizer's state does not fit in the memory of cpu"
    assert re.search(r"of its [\d.]+ GiB are free; tensors of this process hold [\d.]+ GiB", caught.value.why)
    assert caught.value.why.endswith("torch said: Tried to allocate 80.00 GiB.")
    with pytest.raises(ValueError), HOST.allocating("nothing"):
        raise ValueError


def test_the_host_has_one_device() -> None:
    assert HOST.device_count() == 1
    HOST.set_device(0)
    with pytest.raises(Exception, match="there is no CPU device 1"):
        HOST.set_device(1)


def test_a_range_shows_in_the_profile() -> None:
    with torch.profiler.profile() as profile, HOST.range("a named range"):
        torch.ones(2)
    assert "a named range" in {event.key for event in profile.key_averages()}
