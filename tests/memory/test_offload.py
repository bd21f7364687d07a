"""The promises of Offloader on plain modules. The CPU backend counts the C heap; pinned memory is not on it."""

import gc
import resource
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hwrl.errors import MemoryStateError
from hwrl.interfaces import InlineStream
from hwrl.memory import Offloader
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)
WIDTH = 512  # one weight is 1 MiB
BATCH_NBYTES = WIDTH * WIDTH  # several batches
TOLERANCE_NBYTES = 256 * 1024


class Net(nn.Module):
    """Tied weights, a buffer, and two parameters that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        both = torch.full((2, WIDTH), 0.5)
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(value))) * self.scale + self.shift
        return out


def _net() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    data = torch.arange(4 * WIDTH, dtype=torch.float32).reshape(4, WIDTH).sin()
    loss = net(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _state_nbytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*net.parameters(), *net.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def _used_nbytes() -> int:
    gc.collect()  # earlier tests leave garbage
    return BACKEND.memory_info().allocated_nbytes


def _are_away(tensors: Iterable[torch.Tensor]) -> bool:
    (nbytes,) = {bool(one.untyped_storage().nbytes()) for one in tensors}
    return not nbytes


def _away(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[bool, bool]:
    """Return whether the parameters, and whether the optimizer's state, are on the host."""
    return _are_away(net.parameters()), _are_away(one["exp_avg"] for one in optimizer.state.values())


def test_device_memory_is_freed_and_comes_back() -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    nbytes = _state_nbytes(net, optimizer)
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        offloader.offload()  # allocates what is allocated once
        offloader.load()
        before = _used_nbytes()
        offloader.offload()
        assert before - _used_nbytes() == pytest.approx(nbytes, abs=TOLERANCE_NBYTES)
        offloader.load()
        assert _used_nbytes() == pytest.approx(before, abs=TOLERANCE_NBYTES)


def test_parameters_and_optimizer_move_apart() -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        assert offloader.offload(params=False).nbytes > 2 * WIDTH * WIDTH * 4
        assert _away(net, optimizer) == (False, True)
        net(torch.ones(2, WIDTH))
        offloader.load()
        assert offloader.offload(optimizer=False).nbytes < 2 * WIDTH * WIDTH * 4
        assert _away(net, optimizer) == (True, False)


def test_objects_views_and_values_survive() -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    names = {name: value.clone() for name, value in net.state_dict().items()}
    parameters, storage = list(net.parameters()), net.scale.untyped_storage()
    view = net.first.weight.detach()[3]
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        offloader.offload()
        assert storage.nbytes() == 0
        offloader.load()
        assert all(one is other for one, other in zip(parameters, net.parameters(), strict=True))
        assert net.last.weight is net.first.weight
        assert net.shift.untyped_storage().data_ptr() == storage.data_ptr()
        for name, value in net.state_dict().items():
            assert torch.equal(value, names[name]), name
        assert torch.equal(view, names["first.weight"][3])


def test_twenty_cycles_allocate_host_memory_once() -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        offloader.offload()
        held, used = offloader.pool_nbytes, _used_nbytes()
        for _ in range(20):
            with offloader.loaded():
                _step(net, optimizer)
            assert offloader.pool_nbytes == held
        assert _used_nbytes() == pytest.approx(used, abs=TOLERANCE_NBYTES)


def test_what_is_done_already_moves_nothing_and_takes_no_time() -> None:
    net, optimizer = _net()
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        assert (offloader.load().nbytes, offloader.load().seconds) == (0, 0.0)
        first = offloader.offload()
        assert first.nbytes > 0 and first.seconds > 0.0
        again = offloader.offload()
        assert (again.nbytes, again.seconds) == (0, 0.0)
        back = offloader.load()
        assert back.nbytes == first.nbytes and back.seconds > 0.0


def test_what_the_host_holds_already_is_not_copied_again() -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        offloader.offload()
        with offloader.loaded() as moved:
            net.eval()(torch.ones(2, WIDTH))  # reads only
        assert moved.load.nbytes > 0 and (moved.offload.nbytes, moved.offload.seconds) == (0, 0.0)
        offloader.load()
        unchanged = offloader.offload()
        assert (unchanged.nbytes, unchanged.seconds) == (0, 0.0)
        offloader.load()
        with torch.no_grad():
            net.scale.add_(1)
        assert offloader.offload().nbytes == 2 * WIDTH * 4


def _through_data(net: Net) -> None:
    net.first.weight.data.mul_(1.5)


def _through_a_fused_kernel(net: Net) -> None:
    weight, zeros = net.first.weight.detach(), torch.zeros(WIDTH, WIDTH)
    grads, step = torch.ones(WIDTH, WIDTH), torch.tensor(1.0)
    settings: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    lists: tuple[list[torch.Tensor], ...] = ([weight], [grads], [zeros], [zeros.clone()], [], [step])
    torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **settings)


@pytest.mark.parametrize("write", [_through_data, _through_a_fused_kernel])
def test_writes_that_no_version_counter_sees_are_copied(write: Callable[[Net], None]) -> None:
    net, _ = _net()
    with Offloader(net, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        offloader.offload()
        offloader.load()
        version = net.first.weight._version
        write(net)
        assert net.first.weight._version == version, "the case that this test is about"
        expected = net.first.weight.detach().clone()
        assert offloader.offload().nbytes == WIDTH * WIDTH * 4
        offloader.load()
        assert torch.equal(net.first.weight, expected)


def test_loaded_restores_the_state_it_found_on_errors_too() -> None:
    net, optimizer = _net()
    _step(net, optimizer)
    with Offloader(net, optimizer, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        offloader.offload(optimizer=False)
        with pytest.raises(ZeroDivisionError), offloader.loaded():
            assert not _are_away(net.parameters())
            raise ZeroDivisionError
        assert _away(net, optimizer) == (True, False)
        offloader.load()
        with offloader.loaded():
            offloader.offload()
        assert _away(net, optimizer) == (False, False)


def test_memory_that_cannot_be_given_back_is_refused_and_nothing_changes() -> None:
    net = nn.Linear(4, 4)
    net.bias = nn.Parameter(torch.frombuffer(bytearray(16), dtype=torch.float32))
    with Offloader(net, backend=BACKEND, batch_nbytes=BATCH_NBYTES) as offloader:
        with pytest.raises(MemoryStateError, match="cannot be offloaded") as caught:
            offloader.offload()
        assert "hwrl.memory.own_memory(model)" in caught.value.fix
        assert not _are_away(net.parameters())
        net(torch.ones(1, 4))
        net.bias.data = net.bias.data.clone()  # what the fix says
        assert offloader.offload().nbytes > 0


def test_an_error_of_the_device_names_what_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's library may fail in its first call for a stream or an event; then nothing was moved yet."""

    def fail(*_: object) -> None:
        raise TypeError("Event.__new__() got multiple values")

    net, optimizer = _net()
    with Offloader(net, optimizer, backend=BACKEND) as offloader:
        for parts, noun in (({}, "parameters and optimizer"), ({"params": False, "optimizer": False}, "memory")):
            with monkeypatch.context() as broken:
                broken.setattr(InlineStream, "synchronize" if parts else "wait_stream", fail)
                with pytest.raises(MemoryStateError, match=f"the {noun} cannot be offloaded(.|\n)*multiple values"):
                    offloader.offload(**parts)
        assert not _are_away(net.parameters())


def _run_out_of_memory(rank: int) -> list[object]:
    net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])  # 128 MiB
    before = [float(one.detach().sum()) for one in net.parameters()]
    offloader = Offloader(net, backend=BACKEND, batch_nbytes=2048)  # memory runs out after the first batch
    offloader.offload()
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 64 * 2**20, resource.RLIM_INFINITY))
    used = _used_nbytes()
    with pytest.raises(MemoryStateError, match="cannot be loaded"):
        offloader.load()
    away = _are_away(net.parameters()) and _used_nbytes() - used < TOLERANCE_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    offloader.load()
    return [away, before == [float(one.detach().sum()) for one in net.parameters()]]


def test_a_device_without_room_leaves_the_part_offloaded() -> None:
    assert run_processes(_run_out_of_memory, 1) == [[True, True]]


def test_close_gives_the_host_memory_back_to_the_system() -> None:
    offloader = Offloader(nn.Linear(4096, 4096, bias=False), backend=BACKEND)  # 64 MiB, mapped by themselves
    offloader.offload()
    offloader.load()
    held_nbytes, before_nbytes = offloader.pool_nbytes, _resident_nbytes()
    offloader.close()
    assert before_nbytes - _resident_nbytes() == pytest.approx(held_nbytes, rel=0.1)
    assert offloader.offload().nbytes == held_nbytes, "it can be used again, and knows that the copies are gone"
    offloader.close()


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_lent_copy_stays_if_later_storages_move_over_its_range() -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.arange(1000.0))
    with Offloader(model, backend=BACKEND) as offloader:
        offloader.offload()
        copy = offloader.lend(model.b)
        offloader.load()
        model.a = nn.Parameter(torch.zeros(100))  # so the place of b begins earlier
        offloading = threading.Thread(target=offloader.offload)
        offloading.start()
        offloading.join(0.3)
        assert offloading.is_alive() and copy is not None and torch.equal(copy.tensor, torch.arange(1000.0))
        copy.give_back()
        offloading.join(300.0)
        assert not offloading.is_alive()
