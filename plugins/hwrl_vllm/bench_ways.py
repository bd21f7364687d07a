"""The ways of updating a live engine that ``python -m hwrl_vllm.bench`` measures: hwrl's, and vLLM's own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hwrl.cli.bench_peers import Seat
from hwrl.comm import Comm
from hwrl.interfaces import Backend, Capability
from hwrl.weights import WeightReceiver, WeightSender

if TYPE_CHECKING:
    from hwrl_vllm.bench import Plan
    from hwrl_vllm.engine import VllmEngine

Named = Sequence[tuple[str, torch.Tensor]]


class Way(ABC):
    """One process's end of a way of updating; the trainer sends, and the rollout receives."""

    @abstractmethod
    def send(self, version: int, named: Named) -> dict[str, float]:
        """Send the weights; return the seconds of each stage."""

    @abstractmethod
    def receive(self, version: int) -> dict[str, Any]:
        """Load what is sent; return ``pause_s``, in which the engine cannot step, and the ``receiver``'s stages."""


class Hwrl(Way):
    """hwrl's weight link into hwrl's engine."""

    def __init__(self, seat: Seat, engine: VllmEngine | None, *, apart: bool) -> None:
        self._engine = engine
        if engine is not None:
            self._receiver = WeightReceiver(seat.store, replica="r0")
            return
        ipc = seat.backend.supports(Capability.DEVICE_IPC).usable and not apart
        self._sender = WeightSender(seat.store, transport="ipc" if ipc else "device", timeout_s=120.0)
        self._sender.wait_for_receivers(1, timeout_s=300.0)

    def send(self, version: int, named: Named) -> dict[str, float]:
        report = self._sender.publish(version, named)
        return {**report.seconds, "transfer": report.transfer_s}

    def receive(self, version: int) -> dict[str, Any]:
        assert self._engine is not None, "the trainer sends"
        while self._receiver.poll() is None:  # between two steps
            pass
        begin = time.perf_counter()
        received = self._receiver.receive()
        load = time.perf_counter()
        self._engine.load_weights(received.items(), version=received.version)
        end = time.perf_counter()
        return {"pause_s": end - begin, "receiver": {**received.seconds, "load": end - load}}


class Own(Way):
    """One of vLLM's weight-transfer engines: the trainer calls the worker, which the rollout process has."""

    def __init__(self, seat: Seat, engine: VllmEngine | None, *, packed: bool) -> None:
        self._seat, self._engine, self._packed = seat, engine, packed
        self._calls = 0

    def send(self, version: int, named: Named) -> dict[str, float]:
        self._call("start_weight_update")
        begin = time.perf_counter()
        self._send(named)
        end = time.perf_counter()
        self._call("finish_weight_update")
        self._post("")
        return {"update": end - begin}

    def receive(self, version: int) -> dict[str, Any]:
        assert self._engine is not None, "the trainer sends"
        begin = 0.0
        while True:
            method, arguments = self._seat.ask(self._key("call", self._calls + 1))
            self._calls += 1
            begin = begin or time.perf_counter()
            if not method:
                break
            self._engine._vllm.collective_rpc(method, kwargs=arguments)
            self._seat.backend.synchronize()
            self._seat.tell(self._key("done", self._calls), True)
        self._engine.version = version
        return {"pause_s": time.perf_counter() - begin, "receiver": {}}

    @abstractmethod
    def _send(self, named: Named) -> None:
        """Send by vLLM's trainer side."""

    def _post(self, method: str, **arguments: Any) -> None:
        """Let the worker call ``method``."""
        self._calls += 1
        self._seat.tell(self._key("call", self._calls), (method, arguments))

    def _await(self) -> None:
        self._seat.ask(self._key("done", self._calls))

    def _call(self, method: str, **arguments: Any) -> None:
        self._post(method, **arguments)
        self._await()

    def _key(self, what: str, number: int) -> str:
        return f"{type(self).__name__}/{self._packed}/{what}/{number}"


class OwnIpc(Own):
    """Into a process on the same device: a handle for each tensor, or for a buffer of 1 GiB in turns."""

    def _send(self, named: Named) -> None:
        module = import_module("vllm.distributed.weight_transfer.ipc_engine")

        def update(info: Any) -> None:
            fields = {name: value for name, value in vars(info).items() if value is not None}
            self._call("update_weights", update_info=fields)

        arguments = module.IPCTrainerSendWeightsArgs(send_mode=update, packed=self._packed)
        module.IPCWeightTransferEngine.trainer_send_weights(iter(named), arguments)


class OwnNccl(Own):
    """To another device, by broadcasts of packed tensors."""

    def __init__(self, seat: Seat, engine: VllmEngine | None, *, packed: bool) -> None:
        super().__init__(seat, engine, packed=packed)
        self._module = import_module("vllm.distributed.weight_transfer.nccl_engine")
        host, port = seat.free_endpoint()
        info = {"master_address": host, "master_port": port, "world_size": 2}
        if engine is None:
            self._group = self._module.NCCLWeightTransferEngine.trainer_init(info)
        else:
            engine._vllm.collective_rpc("init_weight_transfer_engine", args=({**info, "rank_offset": 1},))

    def _send(self, named: Named) -> None:
        described = {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
        }
        self._post("update_weights", update_info={**described, "packed": self._packed})
        arguments = self._module.NCCLTrainerSendWeightsArgs(group=self._group, packed=self._packed)
        self._module.NCCLWeightTransferEngine.trainer_send_weights(iter(named), arguments)
        self._await()


def own_transfer(backend: Backend, *, apart: bool) -> dict[str, Any]:
    """Return the engine arguments for vLLM's own ways; none where they do not work."""
    if backend.comm_library() == "nccl":
        return {"weight_transfer_config": {"backend": "nccl" if apart else "ipc"}}
    return {}


def make_ways(seat: Seat, engine: VllmEngine | None, *, apart: bool) -> dict[str, Way]:
    """Return the ways that work here; blocks until the other process does so, too."""
    ways: dict[str, Way] = {"hwrl": Hwrl(seat, engine, apart=apart)}
    if own_transfer(seat.backend, apart=apart):
        own = OwnNccl if apart else OwnIpc
        ways["vLLM's own, packed"] = own(seat, engine, packed=True)
        if not apart:
            ways["vLLM's own"] = own(seat, engine, packed=False)
    return ways


def wire_s(seat: Seat, plan: Plan) -> tuple[int, float]:
    """Return the model's bytes, and the least time of five in which they move from one device to the other, flat.

    On one device that is a copy there, by the trainer.
    """
    from hwrl.models import build_model

    with torch.device("meta"):
        model = build_model(plan.model_directory, dtype=torch.bfloat16)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=seat.backend.device())
    seconds = _broadcasts(seat, flat) if plan.apart or not seat.backend.device_count() else _copies(seat, flat)
    del flat
    seat.backend.empty_cache()
    return nbytes, min(seconds)


def _broadcasts(seat: Seat, flat: torch.Tensor) -> list[float]:
    group = Comm(seat.backend).standalone_group(seat.store, rank=seat.rank, size=2, name="wire", timeout_s=120.0)
    seconds = [_seconds(seat, lambda: group.broadcast(flat, src=0)) for _ in range(5)]
    group.close()
    return seconds


def _copies(seat: Seat, flat: torch.Tensor) -> list[float]:
    if seat.rank:
        return [0.0]
    spare = torch.empty_like(flat)
    return [_seconds(seat, lambda: spare.copy_(flat)) for _ in range(5)]


def _seconds(seat: Seat, move: Any) -> float:
    seat.backend.synchronize()
    begin = time.perf_counter()
    move()
    seat.backend.synchronize()
    return time.perf_counter() - begin
