"""An error at any point of an offload or a load leaves everything as it was: each call is made to fail once."""

import sys
from collections.abc import Callable, Iterable
from itertools import count
from types import FrameType, TracebackType

import pytest
import torch
from torch import nn

from hwrl.errors import MemoryStateError
from hwrl.memory import Offloader
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)
OUTSIDE = ("torch", "hwrl_cpu", "hwrl.interfaces.backend", "hwrl.interfaces.inline")
DATA = torch.linspace(-1, 1, 64).reshape(4, 16)


class Fault(RuntimeError):
    """What a failing call raises before it did its work, as a device without memory does."""


class Interrupt(BaseException):
    """What a call raises after it did its work, as Ctrl-C does."""


class FailingCall:
    """Makes one call from hwrl.memory to torch or to the backend fail: the one with ``number``, from 1."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._left, self._error = number, error
        self._events = ("call", "c_call") if error is Fault else ("return", "c_return")

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, called: object) -> None:
        if event in self._events and self._leaves_memory(frame, called if event.startswith("c_") else None):
            self._left -= 1
            if not self._left:
                raise self._error("injected")

    @staticmethod
    def _leaves_memory(frame: FrameType, builtin: object) -> bool:
        caller = frame.f_back if builtin is None else frame
        owner = getattr(builtin, "__self__", None)
        words = (type(owner).__module__, getattr(owner, "__module__", ""))
        outside = [frame.f_globals["__name__"]] if builtin is None else words
        inside = caller is not None and str(caller.f_globals["__name__"]).startswith("hwrl.memory")
        return inside and any(str(word).startswith(OUTSIDE) for word in outside)


class Trained:
    """A small model with every kind of memory, its optimizer, and the bytes that they had at the start."""

    def __init__(self) -> None:
        self.model = nn.Linear(16, 16, bias=False)
        self.model.register_buffer("scale", torch.ones(16))
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.model(DATA).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._before = [one.clone() for one in self._tensors()]

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from state.values()

    def check_here(self) -> None:
        """Everything has its bytes, and can be used."""
        pairs = list(zip(self._tensors(), self._before, strict=True))
        assert all(one.untyped_storage().nbytes() == other.untyped_storage().nbytes() for one, other in pairs)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert all(type(one) is nn.Parameter for one in self.model.parameters())
        for use in self._uses():
            use()

    def check_away(self) -> None:
        """Nothing has memory or can be used."""
        assert not any(one.untyped_storage().nbytes() for one in self._tensors())
        for use in self._uses():
            with pytest.raises(MemoryStateError, match="cannot be used"):
                use()

    def _uses(self) -> list[Callable[[], object]]:  # a step without gradients changes nothing
        return [lambda: self.model(DATA), self.model.state_dict, self.optimizer.step, self.optimizer.state_dict]


def _fails(act: Callable[[], object], number: int, error: type[BaseException]) -> bool:
    """Do ``act`` with one failing call; return whether it was reached."""
    try:
        with FailingCall(number, error):
            act()
    except (MemoryStateError, Interrupt):
        return True
    return False


@pytest.mark.parametrize("error", [Fault, Interrupt])
def test_an_offload_that_fails_at_any_call_changes_nothing(error: type[BaseException]) -> None:
    trained = Trained()
    for number in count(1):
        offloader = Offloader(trained.model, trained.optimizer, backend=BACKEND, batch_nbytes=64)
        if not _fails(offloader.offload, number, error):
            break
        trained.check_here()
        offloader.offload()
        trained.check_away()
        offloader.close()
        trained.check_here()
    assert number > 80, "the calls were not seen"
    trained.check_away()
    offloader.close()
    trained.check_here()


@pytest.mark.parametrize("error", [Fault, Interrupt])
def test_a_load_that_fails_at_any_call_leaves_everything_on_the_host(error: type[BaseException]) -> None:
    trained = Trained()
    offloader = Offloader(trained.model, trained.optimizer, backend=BACKEND, batch_nbytes=64)
    for number in count(1):
        offloader.offload()
        if not _fails(offloader.load, number, error):
            break
        trained.check_away()
        offloader.load()
        trained.check_here()
    assert number > 40, "the calls were not seen"
    trained.check_here()


def test_after_an_error_that_cannot_be_undone_use_is_refused_and_load_brings_all_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = Trained()
    offloader = Offloader(trained.model, trained.optimizer, backend=BACKEND, batch_nbytes=64)
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", _BreaksAfter(ncalls=5))
        with pytest.raises(MemoryStateError, match="parameters cannot be brought back after an error") as caught:
            offloader.offload()
    assert "and load" in caught.value.fix
    with pytest.raises(MemoryStateError, match="cannot be used"):
        trained.model(DATA)
    offloader.load()  # what the fix says
    trained.check_here()


class _BreaksAfter:
    """``resize_`` of a device that breaks."""

    def __init__(self, *, ncalls: int) -> None:
        self._left, self._resize = ncalls, torch.UntypedStorage.resize_

    def __get__(self, storage: torch.UntypedStorage, kind: type) -> Callable[[int], object]:
        return lambda nbytes: self._call(storage, nbytes)

    def _call(self, storage: torch.UntypedStorage, nbytes: int) -> object:
        self._left -= 1
        if self._left < 0:
            raise Fault("the device is gone")
        return self._resize(storage, nbytes)
