"""The ways of ``hwrl_bench.vllm_updates`` to update a live engine: hwrl's weight link, and vLLM's own transfers."""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hwrl import Backend, Capability, get_backend
from hwrl.comm import Comm
from hwrl.interfaces import WeightOffer
from hwrl.rollout import INCARNATION, EngineModels, ModelLink
from hwrl.weights import POLICY, WeightReceiver, WeightSender
from hwrl_bench.ways import TransferResult, TransferWay
from hwrl_bench.worker import BenchWorker

if TYPE_CHECKING:
    from hwrl_vllm import VllmEngine

Named = Sequence[tuple[str, torch.Tensor]]


class EngineLink(TransferWay):
    """hwrl's weight link into hwrl's engine. The engine's workers receive straight into their weights.

    The engine cannot step while it receives; ``pause_s`` is that time. The trainer gives no ``engine``.
    """

    def __init__(self, worker: BenchWorker, named: Named, engine: VllmEngine | None, *, apart: bool) -> None:
        self._named, self._engine = named, engine
        if engine is not None:
            self._join(worker, engine)
            return
        ipc = worker.backend.supports(Capability.DEVICE_IPC).usable and not apart
        self._sender = WeightSender(worker.store, transport="ipc" if ipc else "device", timeout_s=120.0)
        self._sender.wait_for_receivers(1, timeout_s=300.0)

    def send(self, version: int) -> TransferResult:
        report = self._sender.publish(version, self._named, {INCARNATION: 0})
        return TransferResult(stages={**report.seconds, "transfer": report.transfer_s})

    def receive(self, version: int) -> TransferResult:
        while not self._link.poll():  # a run's engine steps here
            pass
        begin, self._pause_s = time.perf_counter(), 0.0
        if not self._link.update():
            raise RuntimeError(f"version {version} was not received; the log says why")
        return TransferResult(stages={"receive": time.perf_counter() - begin}, pause_s=self._pause_s)

    def _join(self, worker: BenchWorker, engine: VllmEngine) -> None:
        self._link: ModelLink = EngineModels(
            engine, worker.store, name=POLICY, replica="r0", timeout_s=120.0, poll_s=0.0
        )
        receive = engine.receive_weights

        def timed(offer: WeightOffer) -> int | None:
            begin = time.perf_counter()
            try:
                return receive(offer)
            finally:
                self._pause_s = time.perf_counter() - begin

        engine.receive_weights = timed  # type: ignore[method-assign]  # to measure its time


class TwoVersionsLink(EngineLink):
    """The same with room for two versions. The engine steps until the new version is whole, and then loads it."""

    def receive(self, version: int) -> TransferResult:
        assert self._engine is not None, "the trainer sends"
        while self._receiver.poll() is None:  # a run's engine steps here
            pass
        received = self._receiver.receive()
        load = time.perf_counter()
        self._engine.load_weights(received.items(), version=received.version)
        load_s = time.perf_counter() - load
        return TransferResult(stages={**received.seconds, "load": load_s}, pause_s=load_s)

    def _join(self, worker: BenchWorker, engine: VllmEngine) -> None:
        self._receiver = WeightReceiver(worker.store, replica="r0")


class VllmTransfer(TransferWay):
    """One of vLLM's weight-transfer engines. The rollout process makes the trainer's calls in vLLM's worker."""

    def __init__(self, worker: BenchWorker, named: Named, engine: VllmEngine | None, *, packed: bool) -> None:
        self._worker, self._named, self._engine, self._packed = worker, named, engine, packed
        self._calls = 0

    def send(self, version: int) -> TransferResult:
        self._call("start_weight_update")
        begin = time.perf_counter()
        self._send_tensors()
        end = time.perf_counter()
        self._call("finish_weight_update")
        self._post("")
        return TransferResult(stages={"update": end - begin})

    def receive(self, version: int) -> TransferResult:
        assert self._engine is not None, "the trainer sends"
        begin = 0.0
        while True:
            method, arguments = self._worker.get(self._key("call", self._calls + 1))
            self._calls += 1
            begin = begin or time.perf_counter()
            if not method:
                break
            self._engine.vllm.collective_rpc(method, kwargs=self._decode(arguments))
            self._worker.backend.synchronize()
            self._worker.put(self._key("done", self._calls), True)
        self._engine.version = version
        return TransferResult(pause_s=time.perf_counter() - begin)

    @abstractmethod
    def _send_tensors(self) -> None:
        """Send by vLLM's own code for a trainer."""

    def _decode(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for vLLM's worker, from the arguments that the trainer sent."""
        return arguments

    def _post(self, method: str, **arguments: Any) -> None:
        """Let vLLM's worker run ``method``. Does not wait."""
        self._calls += 1
        self._worker.put(self._key("call", self._calls), (method, arguments))

    def _wait(self) -> None:
        """Wait until vLLM's worker has finished the last call."""
        self._worker.get(self._key("done", self._calls))

    def _call(self, method: str, **arguments: Any) -> None:
        """Let vLLM's worker run ``method``, and wait for its end."""
        self._post(method, **arguments)
        self._wait()

    def _key(self, kind: str, number: int) -> str:
        return f"{type(self).__name__}/{self._packed}/{kind}/{number}"


class VllmIpc(VllmTransfer):
    """vLLM's transfer to a process on the same device.

    It sends a handle for each tensor or, if ``packed``, for each filling of a buffer of 1 GiB. Handles can only be
    pickled, so they go through files in ``directory``, which other users cannot open.
    """

    def __init__(
        self, worker: BenchWorker, named: Named, engine: VllmEngine | None, *, packed: bool, directory: Path
    ) -> None:
        super().__init__(worker, named, engine, packed=packed)
        self._directory = directory

    def _send_tensors(self) -> None:
        module = import_module("vllm.distributed.weight_transfer.ipc_engine")

        def update(info: Any) -> None:
            file = self._directory / f"{self._packed}-{self._calls}.handles"
            file.write_bytes(pickle.dumps({name: value for name, value in vars(info).items() if value is not None}))
            self._call("update_weights", file=str(file))

        arguments = module.IPCTrainerSendWeightsArgs(send_mode=update, packed=self._packed)
        module.IPCWeightTransferEngine.trainer_send_weights(iter(self._named), arguments)

    def _decode(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if "file" not in arguments:
            return arguments
        file = Path(arguments["file"])
        update_info = pickle.loads(file.read_bytes())
        file.unlink()
        return {"update_info": update_info}


class VllmNccl(VllmTransfer):
    """vLLM's transfer to another device, by broadcasts; ``packed`` puts several tensors into one."""

    def __init__(self, worker: BenchWorker, named: Named, engine: VllmEngine | None, *, packed: bool) -> None:
        super().__init__(worker, named, engine, packed=packed)
        self._module = import_module("vllm.distributed.weight_transfer.nccl_engine")
        host, port = worker.free_endpoint()
        info = {"master_address": host, "master_port": port, "world_size": 2}
        if engine is None:
            self._group = self._module.NCCLWeightTransferEngine.trainer_init(info)
        else:
            engine.vllm.collective_rpc("init_weight_transfer_engine", args=({**info, "rank_offset": 1},))

    def _send_tensors(self) -> None:
        described = {
            "names": [name for name, _ in self._named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in self._named],
            "shapes": [list(tensor.shape) for _, tensor in self._named],
        }
        self._post("update_weights", update_info={**described, "packed": self._packed})
        arguments = self._module.NCCLTrainerSendWeightsArgs(group=self._group, packed=self._packed)
        self._module.NCCLWeightTransferEngine.trainer_send_weights(iter(self._named), arguments)
        self._wait()


def vllm_transfer_options(backend: Backend, *, apart: bool) -> dict[str, Any]:
    """Return the engine arguments for vLLM's own transfers; empty where vLLM has none."""
    if backend.comm_library() == "nccl":
        return {"weight_transfer_config": {"backend": "nccl" if apart else "ipc"}}
    return {}


def make_ways(
    worker: BenchWorker,
    named: Named,
    engine: VllmEngine | None,
    *,
    apart: bool,
    keep_old: bool,
    directory: Path,
) -> dict[str, TransferWay]:
    """Return the ways for this machine, by name. Blocks until the other process calls this, too.

    The trainer gives the tensors to send, ``named``; the rollout gives its ``engine``. Other users cannot open
    ``directory``. With ``keep_old`` hwrl's way has room for two versions.
    """
    link = TwoVersionsLink if keep_old else EngineLink
    ways: dict[str, TransferWay] = {"hwrl": link(worker, named, engine, apart=apart)}
    if not vllm_transfer_options(worker.backend, apart=apart):
        return ways
    if apart:
        return ways | {"vLLM's own, packed": VllmNccl(worker, named, engine, packed=True)}
    for name, packed in (("vLLM's own, packed", True), ("vLLM's own", False)):
        ways[name] = VllmIpc(worker, named, engine, packed=packed, directory=directory)
    return ways


def wire_s(worker: BenchWorker, *, nbytes: int, apart: bool) -> float:
    """Return the seconds in which ``nbytes`` move from device to device as one flat tensor: the least of five times.

    On one device the trainer copies the tensor there; without an accelerator it is broadcast.
    """
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=worker.backend.device())
    broadcast = apart or not worker.backend.device_count()
    seconds = _broadcast_seconds(worker, flat) if broadcast else _copy_seconds(worker, flat)
    del flat
    worker.backend.empty_cache()
    return min(seconds)


def _broadcast_seconds(worker: BenchWorker, flat: torch.Tensor) -> list[float]:
    group = Comm(worker.backend).standalone_group(worker.store, rank=worker.rank, size=2, name="wire", timeout_s=120.0)
    seconds = [_device_seconds(worker, lambda: group.broadcast(flat, src=0)) for _ in range(5)]
    group.close()
    return seconds


def _copy_seconds(worker: BenchWorker, flat: torch.Tensor) -> list[float]:
    if worker.rank:
        return [0.0]
    target = torch.empty_like(flat)
    return [_device_seconds(worker, lambda: target.copy_(flat)) for _ in range(5)]


def _device_seconds(worker: BenchWorker, move: Callable[[], object]) -> float:
    worker.backend.synchronize()
    begin = time.perf_counter()
    move()
    worker.backend.synchronize()
    return time.perf_counter() - begin


def held_nbytes(*, reset: bool) -> tuple[int, int]:
    """Return the bytes of this process's tensors on the device now, and the most since the last call with ``reset``.

    Without an accelerator both are the present value, because a heap keeps no record of the most.
    """
    backend = get_backend()
    info = backend.memory_info()
    if not torch.accelerator.is_available():
        return info.allocated_nbytes, info.allocated_nbytes
    if reset:
        torch.accelerator.reset_peak_memory_stats()
    return info.allocated_nbytes, info.peak_nbytes


def held_by_workers(worker: Any, *, reset: bool) -> tuple[int, int]:
    """Return :func:`held_nbytes`. Each worker of vLLM calls this."""
    return held_nbytes(reset=reset)
