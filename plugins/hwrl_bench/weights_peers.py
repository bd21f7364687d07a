"""Weight transfers of other packages for ``hwrl bench weights``, each through the package's own code."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hwrl.errors import UnsupportedError
from hwrl_bench.ways import TransferResult
from hwrl_bench.weights_ways import PayloadWay, TransferSetup
from hwrl_bench.worker import BenchWorker

if TYPE_CHECKING:
    import torch

    from hwrl_bench.weights_payload import Tensors


class PeerTransfer(PayloadWay):
    """A peer's way. It gets contiguous tensors, and copies into the receiver's tensors of the same names."""

    @property
    def target(self) -> Tensors:
        """The receiver's tensors."""
        return self.payload.views

    def prepare(self) -> None:
        self.tensors = {name: tensor.contiguous() for name, tensor in self.payload.named}

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """Copy received tensors into the receiver's."""
        for name, tensor in pairs:
            self.target[name].copy_(tensor)

    def finished(self) -> TransferResult:
        """Wait for the device, because a peer has streams of its own; return a receiver's result."""
        self.worker.backend.synchronize()
        return TransferResult(tensors=self.target if self.worker.rank else None)


class Vllm(PeerTransfer):
    """vLLM's packed broadcast, with its own group and its default buffers."""

    package, module = "vllm", "vllm"

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        backend = self.worker.backend
        library = backend.comm_library()
        transfer = "vllm.distributed.weight_transfer"
        packed = importlib.import_module(f"{transfer}.packed_tensor")
        try:
            self._produce = getattr(packed, f"packed_{library}_broadcast_producer")
            self._consume = getattr(packed, f"packed_{library}_broadcast_consumer")
        except AttributeError as exc:
            raise UnsupportedError(
                f"vLLM {self.version()} has no packed broadcast over {library}",
                why=str(exc),
                fix="measure vLLM on a device with a collective library that it supports",
            ) from exc
        connect = importlib.import_module(f"{transfer}.{library}_common").stateless_init_process_group
        endpoint, device = self.worker.free_endpoint(), backend.current_index()
        self._group = connect(*endpoint, self.worker.rank, self.worker.size, device=device)

    def send(self, version: int) -> TransferResult:
        self._produce(iter(self.tensors.items()), self._group, 0, lambda item: item[1])
        return self.finished()

    def receive(self, version: int) -> TransferResult:
        described = ((name, (list(tensor.shape), tensor.dtype)) for name, tensor in self.target.items())
        self._consume(described, self._group, 0, self.load, device=self.worker.backend.device())
        return self.finished()


class Verl(PeerTransfer):
    """verl's checkpoint engine for the device's collective library, in Ray workers with a device each."""

    package, module = "verl", "verl"
    _BUCKET_NBYTES = 2 << 30  # verl's default

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        rank, size = self.worker.rank, self.worker.size
        engines = importlib.import_module("verl.checkpoint_engine")
        engine = engines.CheckpointEngineRegistry.get(self.worker.backend.comm_library())
        self._engine = engine(self._BUCKET_NBYTES, is_master=rank == 0, multi_sender=False)
        metadata = self._engine.prepare()
        if rank == 0:
            self.worker.put("metadata", dataclasses.asdict(metadata))
        metadata = SimpleNamespace(**self.worker.get("metadata"))  # verl reads its attributes
        sender, receivers = engine.build_topology(1, size - 1, [metadata])
        self._engine.init_process_group(**{key: [*sender[key], *receivers[key]][rank] for key in sender})

    @classmethod
    def run(cls, measure: Callable[..., Any], size: int, *args: Any, timeout_s: float) -> list[Any]:
        import ray

        from hwrl import get_backend

        devices = get_backend().devices
        # verl starts one more actor, for the group's rendezvous; it needs a CPU.
        resources = {**devices.ray_options(size), "num_cpus": size + 1}
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **resources)
        try:
            task = ray.remote(max_retries=0, **devices.ray_options(1))(measure)
            results: list[Any] = ray.get([task.remote(rank, size, *args) for rank in range(size)], timeout=timeout_s)
            return results
        except ray.exceptions.RayTaskError as exc:
            raise exc.cause from exc
        finally:
            ray.shutdown()

    def send(self, version: int) -> TransferResult:
        asyncio.run(self._engine.send_weights(iter(self.tensors.items())))
        return self.finished()

    def receive(self, version: int) -> TransferResult:
        async def load() -> None:
            async for name, tensor in self._engine.receive_weights():
                self.target[name].copy_(tensor)

        asyncio.run(load())
        return self.finished()


class CheckpointEngine(PeerTransfer):
    """checkpoint-engine's broadcast: for each device a parameter server, and a process with the model.

    Rank 0 is the first server; it has all tensors in page-locked host memory before the clock starts. The receivers are
    models. Processes ``size`` and above are the missing partners: a model beside rank 0, which drops all tensors, and
    the servers of the receivers.
    """

    package, module = "checkpoint-engine", "checkpoint_engine"

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        self._round = 0
        if self.worker.rank == 0:
            self._server = _EngineServer(self.worker, 0)
        else:
            self._model = _EngineModel(self.worker, self.worker.rank)

    @classmethod
    def run(cls, measure: Callable[..., Any], size: int, *args: Any, timeout_s: float) -> list[Any]:
        from hwrl.testing import run_processes

        return run_processes(_measure_or_serve, 2 * size, size, measure, *args, timeout_s=timeout_s)[:size]

    def prepare(self) -> None:
        super().prepare()
        self._round += 1
        if self.worker.rank == 0:
            self.worker.put(f"prepare/{self._round}", True)
            self._server.register(self.tensors)
            self._server.gather()

    def send(self, version: int) -> TransferResult:
        self.worker.put(f"update/{self._round}", True)
        self._server.update(self._round)
        return self.finished()

    def receive(self, version: int) -> TransferResult:
        self._model.receive(self._round, self.load)
        return self.finished()

    def close(self) -> None:
        if self.worker.rank == 0:
            self.worker.put(f"prepare/{self._round + 1}", False)


def _measure_or_serve(rank: int, size: int, measure: Callable[..., Any], address: str, *args: Any) -> Any:
    """Run ``measure`` in ranks below ``size``, and a partner process of checkpoint-engine in the others."""
    if rank < size:
        return measure(rank, size, address, *args)
    from hwrl import get_backend

    backend, number, turn = get_backend(), rank - size, 1
    backend.set_device(number % max(1, backend.device_count()))
    worker = BenchWorker.connect(rank, size, address, backend)
    server, model = (_EngineServer(worker, number), None) if number else (None, _EngineModel(worker, 0))
    while worker.get(f"prepare/{turn}"):
        if server is not None:
            server.gather()
            worker.get(f"update/{turn}")
            server.update(turn)
        if model is not None:
            model.receive(turn, lambda pairs: None)
        turn += 1
    return None


class _EngineServer:
    """A parameter server of checkpoint-engine; server 0 has the tensors."""

    _CHECKPOINT = "bench"

    def __init__(self, worker: BenchWorker, number: int) -> None:
        from checkpoint_engine.ps import ParameterServer

        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(worker.size)}  # it reads a rank of 0 from there only
        host, port = worker.free_endpoint()
        self._worker, self._number = worker, number
        self._server = ParameterServer(auto_pg=False, master_addr=host, master_port=port)
        self._server.init_process_group()  # once: with auto_pg every update would build and destroy one

    def register(self, tensors: Tensors) -> None:
        """Copy the tensors into page-locked host memory, the same in every round."""
        self._server.unregister_checkpoint(self._CHECKPOINT)
        self._server.register_checkpoint(self._CHECKPOINT, named_tensors=dict(tensors), use_shared_memory_pool=True)

    def gather(self) -> None:
        """Agree with the other servers on the tensors to send; block until all servers are here."""
        self._server.gather_metas(self._CHECKPOINT)

    def update(self, turn: int) -> None:
        """Send the tensors to every model; block until all models loaded them."""

        def call_model(handles: list[tuple[str, str]]) -> None:
            self._worker.put(f"handle/{turn}/{self._number}", handles[self._number][1])

        self._server.update(self._CHECKPOINT, call_model)


class _EngineModel:
    """The process with the model, beside server ``number``."""

    def __init__(self, worker: BenchWorker, number: int) -> None:
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        self._worker, self._number = worker, number
        self._context, self._update = zmq.Context(), update_weights_from_ipc

    def receive(self, turn: int, load: Callable[[list[tuple[str, torch.Tensor]]], None]) -> None:
        """Give ``load`` the tensors of the server; block until the server has no more."""
        handle = self._worker.get(f"handle/{turn}/{self._number}")
        self._update(self._context, handle, self._worker.backend.current_index(), run=load)


PEERS: dict[str, type[PeerTransfer]] = {peer.package: peer for peer in (CheckpointEngine, Vllm, Verl)}
"""The peers by the names of their packages."""
