"""Other packages' weight transfers for ``hwrl bench weights``, each through that package's own code."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import pickle
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from hwrl.errors import HwrlError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from hwrl.interfaces import Backend

    Tensors = Mapping[str, torch.Tensor]

_WAIT_S = 300.0  # a peer that takes longer is ended from outside


@dataclass(frozen=True)
class Seat:
    """Where one process of a peer sits: rank 0 sends, the ranks from 1 to ``size - 1`` receive."""

    rank: int
    size: int
    store: Store
    backend: Backend

    @classmethod
    def take(cls, rank: int, size: int, address: str, backend: Backend) -> Seat:
        """Return a seat whose store, at ``address``, is asked by nobody else."""
        from hwrl.comm import connect_store

        return cls(rank, size, connect_store(address, timeout_s=_WAIT_S), backend)

    def tell(self, key: str, value: object) -> None:
        """Leave ``value`` for the other processes; a key is used once."""
        self.store.set(f"peer/{key}", pickle.dumps(value))  # type: ignore[arg-type]  # torch's stub knows str only

    def ask(self, key: str) -> Any:
        """Block until some process told ``key``, and return the value."""
        return pickle.loads(self.store.get(f"peer/{key}"))

    def free_endpoint(self) -> tuple[str, int]:
        """Return a host and a free port of this machine, the same in every process; call it once."""
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.tell("endpoint", probe.getsockname())
        host, port = self.ask("endpoint")
        return host, port


class Peer(ABC):
    """One process's part in another package's way of moving tensors.

    The constructor connects; it blocks until the other processes do, and raises where the package cannot run.
    Then all processes take turns in ``prepare``, ``send`` or ``receive``, and ``close`` at the end.
    """

    package: ClassVar[str]
    module: ClassVar[str]
    """What the package is imported as."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    @classmethod
    def why_not(cls) -> str | None:
        """Return why the peer cannot be tried, or None; looks for the package and imports nothing."""
        return None if importlib.util.find_spec(cls.module) else f"{cls.package} is not installed"

    @classmethod
    def version(cls) -> str:
        """Return the version of the distribution that brings the module: builds for one device have other names."""
        return metadata.version(metadata.packages_distributions()[cls.module][0])

    @classmethod
    def run(cls, measure: Callable[..., Any], size: int, *args: Any, timeout_s: float) -> list[Any]:
        """Return what ``measure(rank, size, *args)`` returned in ``size`` processes that this package can work in.

        ``args`` begins with the address of a store. No process outlives the call.
        """
        from hwrl.testing.processes import run_processes

        return run_processes(measure, size, size, *args, timeout_s=timeout_s)

    def prepare(self, tensors: Tensors) -> None:
        """Take what rank 0 sends next: contiguous tensors on the device, with new values. No clock runs."""
        self.tensors = tensors

    @abstractmethod
    def send(self) -> None:
        """Send the prepared tensors; may return before the device is done."""

    @abstractmethod
    def receive(self, into: Tensors) -> None:
        """Copy what rank 0 sends into the tensors of the same names; may return before the device is done."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of processes that only this peer has."""


def one_line(exc: Exception) -> str:
    """Return what ``exc`` says, without a library's stack below it."""
    if isinstance(exc, HwrlError):
        return f"{exc.what}: {exc.why}"
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"


class Vllm(Peer):
    """vLLM's packed broadcast, with its own group and its default buffers."""

    package, module = "vllm", "vllm"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        library = seat.backend.comm_library()
        transfer = "vllm.distributed.weight_transfer"
        packed = importlib.import_module(f"{transfer}.packed_tensor")
        try:
            self._produce = getattr(packed, f"packed_{library}_broadcast_producer")
            self._consume = getattr(packed, f"packed_{library}_broadcast_consumer")
        except AttributeError as exc:
            raise UnsupportedError(
                f"vLLM {self.version()} has no packed broadcast over {library}",
                why=str(exc),
                fix="measure it on a device whose collective library it has one for",
            ) from exc
        join = importlib.import_module(f"{transfer}.{library}_common").stateless_init_process_group
        self._group = join(*seat.free_endpoint(), seat.rank, seat.size, device=seat.backend.current_index())

    def send(self) -> None:
        self._produce(iter(self.tensors.items()), self._group, 0, lambda item: item[1])

    def receive(self, into: Tensors) -> None:
        described = ((name, (list(tensor.shape), tensor.dtype)) for name, tensor in into.items())

        def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in pairs:
                into[name].copy_(tensor)

        self._consume(described, self._group, 0, load, device=self.seat.backend.device())


class Verl(Peer):
    """verl's checkpoint engine for this device's collective library, in Ray workers with a device each."""

    package, module = "verl", "verl"
    _BUCKET_NBYTES = 2 << 30  # verl's default

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        engines = importlib.import_module("verl.checkpoint_engine")
        engine = engines.CheckpointEngineRegistry.get(seat.backend.comm_library())
        self._engine = engine(self._BUCKET_NBYTES, is_master=seat.rank == 0, multi_sender=False)
        prepared = self._engine.prepare()
        if seat.rank == 0:
            seat.tell("prepared", prepared)
        sender, receivers = engine.build_topology(1, seat.size - 1, [seat.ask("prepared")])
        of_rank = {key: [*sender[key], *receivers[key]][seat.rank] for key in sender}
        self._engine.init_process_group(**of_rank)

    @classmethod
    def run(cls, measure: Callable[..., Any], size: int, *args: Any, timeout_s: float) -> list[Any]:
        import ray

        from hwrl.discovery import get_backend

        devices = get_backend().devices
        # one CPU more than there are tasks: the group's rendezvous is an actor of its own
        room = {**devices.ray_options(size), "num_cpus": size + 1}
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **room)
        try:
            task = ray.remote(max_retries=0, **devices.ray_options(1))(measure)
            results: list[Any] = ray.get([task.remote(rank, size, *args) for rank in range(size)], timeout=timeout_s)
            return results
        except ray.exceptions.RayTaskError as exc:
            raise exc.cause from exc
        finally:
            ray.shutdown()

    def send(self) -> None:
        asyncio.run(self._engine.send_weights(iter(self.tensors.items())))

    def receive(self, into: Tensors) -> None:
        async def load() -> None:
            async for name, tensor in self._engine.receive_weights():
                into[name].copy_(tensor)

        asyncio.run(load())


class CheckpointEngine(Peer):
    """checkpoint-engine's broadcast: a parameter server for each device, and beside it the process that has the model.

    Rank 0 is the first server, which has all tensors in page-locked host memory before the clock starts; the receivers
    are models. The processes ``size`` and up are what is missing: a model beside rank 0, which drops what it gets, and
    the receivers' servers.
    """

    package, module = "checkpoint-engine", "checkpoint_engine"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._round = 0
        if seat.rank == 0:
            self._server = _Server(seat, 0)
        else:
            self._model = _Model(seat, seat.rank)

    @classmethod
    def run(cls, measure: Callable[..., Any], size: int, *args: Any, timeout_s: float) -> list[Any]:
        from hwrl.testing.processes import run_processes

        return run_processes(_measure_or_serve, 2 * size, size, measure, *args, timeout_s=timeout_s)[:size]

    def prepare(self, tensors: Tensors) -> None:
        self._round += 1
        if self.seat.rank == 0:
            self.seat.tell(f"prepare/{self._round}", True)
            self._server.register(tensors)
            self._server.gather()

    def send(self) -> None:
        self.seat.tell(f"update/{self._round}", True)
        self._server.update(self._round)

    def receive(self, into: Tensors) -> None:
        def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in pairs:
                into[name].copy_(tensor)

        self._model.receive(self._round, load)

    def close(self) -> None:
        if self.seat.rank == 0:
            self.seat.tell(f"prepare/{self._round + 1}", False)


def _measure_or_serve(rank: int, size: int, measure: Callable[..., Any], address: str, *args: Any) -> Any:
    """Take ``rank``'s place in ``measure``, or beyond ``size`` that of a process of checkpoint-engine alone."""
    if rank < size:
        return measure(rank, size, address, *args)
    from hwrl.discovery import get_backend

    backend, number, turn = get_backend(), rank - size, 1
    backend.set_device(number % max(1, backend.device_count()))
    seat = Seat.take(rank, size, address, backend)
    server, model = (_Server(seat, number), None) if number else (None, _Model(seat, 0))
    while seat.ask(f"prepare/{turn}"):
        if server is not None:
            server.gather()
            seat.ask(f"update/{turn}")
            server.update(turn)
        if model is not None:
            model.receive(turn, lambda pairs: None)
        turn += 1
    return None


class _Server:
    """A parameter server; server 0 has the tensors."""

    _CHECKPOINT = "bench"

    def __init__(self, seat: Seat, number: int) -> None:
        from checkpoint_engine.ps import ParameterServer

        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(seat.size)}  # it reads a rank of 0 from there only
        host, port = seat.free_endpoint()
        self._seat, self._number = seat, number
        self._server = ParameterServer(auto_pg=False, master_addr=host, master_port=port)
        self._server.init_process_group()  # once: with auto_pg every update would build and destroy one

    def register(self, tensors: Tensors) -> None:
        """Copy the tensors into page-locked host memory, the same in every round."""
        self._server.unregister_checkpoint(self._CHECKPOINT)
        self._server.register_checkpoint(self._CHECKPOINT, named_tensors=dict(tensors), use_shared_memory_pool=True)

    def gather(self) -> None:
        """Agree with the other servers on what is sent; blocks until all are here."""
        self._server.gather_metas(self._CHECKPOINT)

    def update(self, turn: int) -> None:
        """Bring the tensors to every model; blocks until all have loaded them."""

        def call_model(handles: list[tuple[str, str]]) -> None:
            self._seat.tell(f"handle/{turn}/{self._number}", handles[self._number][1])

        self._server.update(self._CHECKPOINT, call_model)


class _Model:
    """The process that has the model, beside server ``number``."""

    def __init__(self, seat: Seat, number: int) -> None:
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        self._seat, self._number, self._context, self._update = seat, number, zmq.Context(), update_weights_from_ipc

    def receive(self, turn: int, load: Callable[[list[tuple[str, torch.Tensor]]], None]) -> None:
        """Give ``load`` everything that the server brings; blocks until the server has no more."""
        handle = self._seat.ask(f"handle/{turn}/{self._number}")
        self._update(self._context, handle, self._seat.backend.current_index(), run=load)


PEERS: dict[str, type[Peer]] = {peer.package: peer for peer in (CheckpointEngine, Vllm, Verl)}
"""The peers by the names of their packages."""
