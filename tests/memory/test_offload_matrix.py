"""Offloader with each kind of optimizer, wrapper and tensor: it moves and comes back bit for bit, or is refused."""

import functools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from hwrl.comm import HashStore
from hwrl.errors import MemoryStateError
from hwrl.memory import Offloader, own_memory
from hwrl_cpu import INFO, CpuBackend
from tests.support.offload_cases import Trained, check_equal_after_offloads

BACKEND = CpuBackend(INFO)
WIDTH = 16
DATA = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Opaque(torch.Tensor):
    """A wrapper subclass that does not say what it is made of."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor) -> "Opaque":
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def from_plain(cls, value: torch.Tensor) -> "Opaque":
        made = cls(torch.empty(value.shape, dtype=torch.int8), torch.ones(1))
        made.store(value)
        return made

    def store(self, value: torch.Tensor) -> None:
        self.scale.copy_(value.abs().max() / 127)
        self.codes.copy_((value / self.scale).round())

    def plain(self) -> torch.Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # torch calls it so
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class Quantized(Opaque):
    """The structure of torchao's states and weights: two tensors, and an outer storage that is null."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: object, size: object, stride: object) -> "Quantized":
        return Quantized(inner["codes"], inner["scale"])


class Scales:
    """The structure of bitsandbytes' ``quant_state``: tensors in an object that a parameter holds."""

    def __init__(self, scale: torch.Tensor, second: "Scales | None") -> None:
        self.scale, self.second, self.dtype = scale, second, scale.dtype

    def apply(self, codes: torch.Tensor) -> torch.Tensor:
        return self.second.apply(codes * self.scale) if self.second else codes * self.scale


class Packed(nn.Parameter):
    """A parameter of codes with an attribute that says what they mean."""

    scales: Scales

    @property
    def hidden(self) -> list[torch.Tensor]:
        assert self.scales.second is not None, "made so"
        return [self.scales.scale, self.scales.second.scale]


class QuantizedMomentum(Optimizer):
    """SGD whose momentum is kept in a tensor subclass."""

    kind: type[Opaque] = Quantized

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no loss to return
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = self.kind.from_plain(parameter.grad)
            state["momentum"].store(state["momentum"].plain() * 0.9 + parameter.grad)
            parameter.sub_(state["momentum"].plain(), alpha=self.param_groups[0]["lr"])


class OpaqueMomentum(QuantizedMomentum):
    kind = Opaque


class Net(nn.Module):
    """A trained weight, a frozen one in a tensor subclass, and a buffer."""

    def __init__(self, frozen: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.frozen = frozen
        self.shift = nn.Buffer(torch.ones(WIDTH))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        out = data @ self.weight + self.shift
        if isinstance(self.frozen, Packed):
            out = out @ self.frozen.scales.apply(self.frozen)
        return out @ self.frozen.plain() if isinstance(self.frozen, Opaque) else out


def _plain(optimizer: Callable[..., Any], net: Callable[[], nn.Module] = Net) -> Trained:
    model = net()
    return Trained(
        model,
        optimizer([one for one in model.parameters() if one.requires_grad], lr=0.1),
        functools.partial(model, DATA),
    )


def _net_of_subclass(kind: type[Opaque]) -> Net:
    return Net(nn.Parameter(kind.from_plain(torch.eye(WIDTH)), requires_grad=False))


def _net_of_packed() -> Net:
    frozen = Packed(torch.eye(WIDTH), requires_grad=False)
    frozen.scales = Scales(torch.full((1,), 0.5), Scales(torch.full((1,), 3.0), None))
    return Net(frozen)


def _accelerate() -> Trained:
    model = Net()
    prepared, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return Trained(model, optimizer, functools.partial(prepared, DATA))


def _zero() -> Trained:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns, of torch.jit

    return _plain(functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW))


def _sequence(*, buffers: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), norm, nn.Linear(WIDTH, WIDTH))


def _trained(model: nn.Module, used: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(used.parameters(), lr=0.05)
    return Trained(model, optimizer, functools.partial(used, DATA))


def _ddp(*, given: str) -> Trained:
    # DDP broadcasts buffers before the module inside could refuse: see docs/memory.md.
    model = _sequence(buffers=given == "wrapper")
    used = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _trained(used if given == "wrapper" else model, used)


def _fsdp2() -> Trained:
    model = _sequence()
    fully_shard(model[0])
    fully_shard(model)
    return _trained(model, model)


def _compiled_in_place() -> Trained:
    model = _sequence()
    model.compile(backend="eager")
    return _trained(model, model)


def _compile_wrapper(*, given: str) -> Trained:
    model = _sequence()
    used: Any = torch.compile(model, backend="eager")
    return _trained(used if given == "wrapper" else model, used)


def _compiled_around() -> Trained:
    model = Net()
    used = torch.compile(lambda: model(DATA) * 2, backend="eager")
    return Trained(model, torch.optim.SGD(model.parameters(), lr=0.1), used)


ADAMW = torch.optim.AdamW
MOVES: dict[str, Callable[[], Trained]] = {
    "accelerate": _accelerate,
    "zero": _zero,
    "subclass state": functools.partial(_plain, QuantizedMomentum),
    "subclass weight": functools.partial(_plain, ADAMW, functools.partial(_net_of_subclass, Quantized)),
    "tensors in attributes": functools.partial(_plain, ADAMW, _net_of_packed),
    "DDP with bucket views": functools.partial(_ddp, given="wrapper"),
    "the module inside DDP": functools.partial(_ddp, given="module"),
    "FSDP2": _fsdp2,
    "module.compile()": _compiled_in_place,
    "torch.compile": functools.partial(_compile_wrapper, given="wrapper"),
    "the module inside torch.compile": functools.partial(_compile_wrapper, given="module"),
    "compiled around": _compiled_around,
}
"""Beside the optimizers and models of ``tests/checkpoint/test_parts.py``."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one Gloo rank, and accelerate's state of this test only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning", "ignore:The .grad attribute of a Te")
@pytest.mark.parametrize("name", MOVES)
def test_it_moves_and_comes_back_bit_for_bit(name: str) -> None:
    check_equal_after_offloads(MOVES[name], BACKEND)


def _sparse() -> Trained:
    case = _plain(ADAMW)
    case.model.register_buffer("mask", torch.eye(WIDTH).to_sparse())
    return case


def _mapped(folder: Path) -> Trained:
    torch.save({"weight": torch.randn(WIDTH, WIDTH)}, folder / "weights")
    case = _plain(torch.optim.SGD)
    case.model.load_state_dict(torch.load(folder / "weights", mmap=True), strict=False, assign=True)
    case.optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    return case


REFUSED: dict[str, tuple[Callable[[Path], Trained], str]] = {
    "state of an opaque subclass": (lambda _: _plain(OpaqueMomentum), "OpaqueMomentum.state['momentum'] is a Opaque"),
    "weight of an opaque subclass": (
        lambda _: _plain(ADAMW, functools.partial(_net_of_subclass, Opaque)),
        "frozen is a Opaque",
    ),
    "sparse": (lambda _: _sparse(), "mask is a torch.sparse_coo"),
    "mapped": (_mapped, "weight has 1,024 bytes that belong to a file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_and_stays_as_it_was(name: str, tmp_path: Path) -> None:
    make, why = REFUSED[name]
    case = make(tmp_path)
    case.step()
    _check_refused(case, why)


def test_a_device_whose_storages_cannot_be_resized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _plain(ADAMW)
    case.step()

    def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
        raise NotImplementedError("no resizing of this device's storages")

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    _check_refused(case, "resize_ does not work there: no resizing")


def _check_refused(case: Trained, why: str) -> None:
    plain = [one for one in case.memory() if not isinstance(one, Opaque) and one.layout is torch.strided]
    before = [one.clone() for one in plain]
    with Offloader(case.model, case.optimizer, backend=BACKEND) as offloader:
        with pytest.raises(MemoryStateError) as caught:
            offloader.offload()
        assert why in caught.value.why and caught.value.fix
        assert all(torch.equal(one, other) for one, other in zip(plain, before, strict=True))
        assert offloader.load().nbytes == 0
        case.step()


def test_mapped_memory_moves_after_the_fix_of_the_message(tmp_path: Path) -> None:
    case = _mapped(tmp_path)
    (weight, *_), before = case.model.parameters(), next(case.model.parameters()).detach().clone()
    own_memory(case.model)
    assert next(case.model.parameters()) is weight and torch.equal(weight, before)
    with Offloader(case.model, case.optimizer, backend=BACKEND) as offloader:
        assert offloader.offload().nbytes > 0


def test_the_optimizer_alone_moves_where_the_model_cannot(tmp_path: Path) -> None:
    case = _mapped(tmp_path)
    case.optimizer = ADAMW(case.model.parameters())
    case.step()
    with Offloader(case.model, case.optimizer, backend=BACKEND) as offloader:
        assert offloader.offload(params=False).nbytes > 0


class NoOptimizer:
    """Steps, and holds no optimizer of torch."""

    def step(self) -> None: ...


def test_an_optimizer_that_is_none_of_torch_is_refused_by_name() -> None:
    with pytest.raises(MemoryStateError, match="optimizer of class NoOptimizer"):
        Offloader(Net(), NoOptimizer(), backend=BACKEND)


def test_tensors_of_several_parts_are_not_lent() -> None:
    model = _net_of_subclass(Quantized)
    optimizer = QuantizedMomentum([model.weight])
    model(DATA).sum().backward()
    optimizer.step()
    with Offloader(model, optimizer, backend=BACKEND) as offloader:
        assert offloader.lend(model.frozen) is None and offloader.can_lend
        offloader.offload()
        assert offloader.lend(model.weight) is not None and not offloader.can_lend
        with pytest.raises(MemoryStateError, match="class Quantized cannot be lent"):
            offloader.lend(model.frozen)
        for use in (model.state_dict, optimizer.state_dict):
            with offloader.lending(), pytest.raises(MemoryStateError, match="class Quantized cannot be lent"):
                use()
        offloader.load(params=False)
        assert not offloader.can_lend, "the model is offloaded"
        with offloader.loaded():
            assert offloader.can_lend
        with offloader.saving():
            model.state_dict()


def test_gradients_and_what_torch_owns_stay_on_the_device() -> None:
    model = _net_of_packed()
    gradient, owned = torch.ones(WIDTH), TensorDataset(torch.ones(WIDTH))
    model.frozen.main_grad, model.frozen.data_set = gradient, owned
    with Offloader(model, backend=BACKEND) as offloader:
        offloader.offload()
        assert gradient.untyped_storage().nbytes() and owned.tensors[0].untyped_storage().nbytes()


@pytest.mark.parametrize("kind", [nn.LazyLinear, nn.Linear])
def test_lazy_and_inference_tensors_move(kind: type[nn.Module]) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(WIDTH) if kind is nn.LazyLinear else nn.Identity())
    with Offloader(model, backend=BACKEND) as offloader:
        assert offloader.offload().nbytes > 0


def test_states_that_the_optimizer_replaced_are_not_held() -> None:
    case = _plain(ADAMW)
    case.step()
    with Offloader(case.model, case.optimizer, backend=BACKEND) as offloader:
        offloader.offload()
        offloader.load()
        (replaced,) = [weakref.ref(state["exp_avg"].untyped_storage()) for state in case.optimizer.state.values()]
        case.optimizer.state.clear()
        assert replaced() is None
