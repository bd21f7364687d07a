"""The contract of device memory: one process exports it, another opens it."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

import pytest
import torch

import hwrl
from hwrl.comm import connect_store
from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import Backend, Capability
from hwrl.testing.contracts.need import need
from hwrl.testing.contracts.pair import StoreAddress, await_others, backend_of_rank
from hwrl.testing.levels import Level
from hwrl.testing.processes import run_processes

_WAIT_S = 60.0
_HERE, _ELSEWHERE, _RENUMBERED = "on the device", "on another device", "that sees only the device, as its first"
_FIRST, _END, _LENGTH = 100, 612, 1000


class DeviceIpcContract:
    """One process exports memory, another opens it: the same bytes, under any device number."""

    level: ClassVar[Level] = Level.DEVICE

    @pytest.fixture(autouse=True)
    def _only_where_memory_can_be_opened(self, backend: Backend) -> None:
        need(backend, Capability.DEVICE_IPC)

    @pytest.mark.parametrize("reader", [_HERE, _ELSEWHERE, _RENUMBERED])
    def test_both_processes_see_the_same_bytes(self, backend: Backend, reader: str) -> None:
        """A part of a larger storage. Both see its values, later writes of the exporter, and writes of the reader."""
        if reader != _HERE and backend.device_count() < 2:
            pytest.skip("needs two devices")
        address = StoreAddress()
        assert run_processes(_export_or_open, 2, backend.info.name, str(address), reader) == [[], []]

    def test_the_exporter_itself_is_refused(self, backend: Backend) -> None:
        """Drivers map memory only into other processes; the process's own handle must raise, not crash."""
        memory = torch.ones(8, device=backend.device())
        with pytest.raises(UnsupportedError):
            backend.open_memory(backend.export_memory(memory))

    @pytest.mark.parametrize("damage", ["nothing left", "a field lost", "numbers for text", "text for numbers"])
    def test_a_damaged_handle_is_refused(self, backend: Backend, damage: str) -> None:
        """Any damage on the way raises an error and never crashes."""
        memory = torch.ones(8, device=backend.device())
        handle: dict[str, Any] = dict(backend.export_memory(memory))
        damaged = {
            "nothing left": {},
            "a field lost": dict(list(handle.items())[:-1]),
            "numbers for text": dict.fromkeys(handle, -1),
            "text for numbers": dict.fromkeys(handle, "zz"),
        }
        with pytest.raises(CommError):
            backend.open_memory(damaged[damage])

    @pytest.mark.parametrize("shape", ["strided", "empty"])
    def test_what_is_no_piece_of_memory_is_refused(self, backend: Backend, shape: str) -> None:
        """Only contiguous tensors with bytes can be exported."""
        whole = torch.ones(4, 4, device=backend.device())
        with pytest.raises(CommError):
            backend.export_memory(whole[:, 0] if shape == "strided" else whole[:0])


def _export_or_open(rank: int, name: str, address: str, reader: str) -> list[str]:
    """Return the errors, one line each."""
    if rank == 0:
        return _export(backend_of_rank(int(reader == _RENUMBERED), name), address)
    return _open(name, address, reader)


def _export(backend: Backend, address: str) -> list[str]:
    store = connect_store(address)
    whole = torch.arange(_LENGTH, dtype=torch.int32, device=backend.device())
    handle = backend.export_memory(whole[_FIRST:_END])
    backend.synchronize()
    store.set("handle", json.dumps(handle))
    store.set("again", json.dumps(backend.export_memory(whole[_FIRST:_END])))
    await_others(store, "read", limit_s=_WAIT_S)
    whole.add_(1)
    backend.synchronize()
    store.set("changed", "")
    await_others(store, "written", limit_s=_WAIT_S)
    wanted = torch.arange(1, _LENGTH + 1, dtype=torch.int32)
    wanted[_FIRST:_END] = 0
    return [] if torch.equal(whole.cpu(), wanted) else ["the exporter does not see the reader's writes"]


def _open(name: str, address: str, reader: str) -> list[str]:
    hwrl.set_backend(name)
    backend, store = hwrl.get_backend(), connect_store(address)
    if reader == _RENUMBERED:
        second = backend.devices.to_physical(1, os.environ)
        os.environ.update(backend.devices.render([second]))  # the first use of the device, below, reads it
    backend.set_device(int(reader == _ELSEWHERE))
    devices = {backend.device(0), backend.device()}  # the exporter's and the reader's own
    await_others(store, "again", limit_s=_WAIT_S)
    opened, again = (backend.open_memory(json.loads(store.get(key))) for key in ("handle", "again"))
    wrong = _differences(opened, again, devices=devices, plus=0) + _wrongly_opened(
        backend, json.loads(store.get("handle"))
    )
    store.set("read", "")
    await_others(store, "changed", limit_s=_WAIT_S)
    wrong += _differences(opened, again, devices=devices, plus=1)
    del again  # the other mapping stays
    opened.zero_()
    opened.cpu()  # waits for the tensor's device; it may not be the current one
    store.set("written", "")
    return wrong


def _wrongly_opened(backend: Backend, handle: dict[str, Any]) -> list[str]:
    """Move each number of ``handle`` outside the exported memory, one at a time; return the handles that open."""
    accepted = []
    for name in [name for name, value in handle.items() if isinstance(value, int)]:
        try:
            backend.open_memory({**handle, name: handle[name] + (1 << 40)})
        except CommError:
            continue
        accepted.append(f"a handle with another {name} was opened")
    return accepted


def _differences(*opened: torch.Tensor, devices: set[torch.device], plus: int) -> list[str]:
    wanted = torch.arange(_FIRST + plus, _END + plus, dtype=torch.int32)
    return [
        f"the opened tensor is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, with other values than {plus=}"
        for tensor in opened
        if tensor.device not in devices or not torch.equal(tensor.cpu(), wanted.view(torch.uint8))
    ]
