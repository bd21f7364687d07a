"""Weights from TRL's trainers to a vLLM server, through hwrl: :func:`weights_by_hwrl`, :class:`AsyncWeights`.

The server is ``vllm serve --weight-transfer-config '{"backend": "hwrl"}'`` with ``VLLM_SERVER_DEV_MODE=1``; see
``docs/vllm.md`` and :class:`~hwrl_vllm.TransferTrainerInit` for the settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from hwrl.errors import attempt_all
from hwrl_vllm import ServerClient, TransferTrainer, TransferTrainerInit

_NamedWeight = tuple[str, torch.Tensor]


@contextlib.contextmanager
def weights_by_hwrl(**settings: Any) -> Iterator[None]:
    """Let the trainers that are made in the block send their weights through hwrl, in ``vllm_mode="server"``.

    TRL has no setting for it, so its client class is replaced until the end of the block. Only the main process opens a
    connection. ``settings`` are those of :class:`~hwrl_vllm.TransferTrainerInit`, such as ``host``.
    """

    class HwrlClient(VLLMClient):  # type: ignore[misc] # TRL is not followed by the type checker
        """TRL's client of a server, with another way for the weights."""

        def init_communicator(self, device: Any = 0) -> None:
            self._sender = ServerWeights(self.base_url, **settings)

        def update_named_params(self, metadata: Any, named_params: Iterator[_NamedWeight]) -> None:
            self._sender.send(named_params, metadata)

        def close_communicator(self) -> None:
            self._sender.close()

    before, vllm_generation.VLLMClient = vllm_generation.VLLMClient, HwrlClient
    try:
        yield
    finally:
        vllm_generation.VLLMClient = before


class AsyncWeights:
    """The ``weight_transfer=`` of TRL's AsyncGRPOTrainer: weights to the server at ``url``, through hwrl.

    Give it on every rank; only the main process connects, when training begins. ``settings`` are those of
    :class:`~hwrl_vllm.TransferTrainerInit`. Requests that run at an update stop, and go on with the new weights. A
    failed update raises the errors of :class:`~hwrl_vllm.TransferTrainer`, and the server goes on with the old weights.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._url, self._settings = url, settings
        self._client = ServerClient(url)
        self._sender: ServerWeights | None = None

    def init_weight_transfer(self) -> None:
        """Connect to all workers of the server. Blocks until they have joined."""
        self._sender = ServerWeights(self._url, **self._settings)

    def pause(self) -> None:
        """Stop the server's requests where they are, and forget what it computed with the old weights."""
        self._client.pause(mode="keep")

    def send_weights(self, iterator: Iterator[_NamedWeight]) -> None:
        """Send the weights; return when every worker has them."""
        assert self._sender is not None, "TRL calls init_weight_transfer first"
        try:
            self._sender.send(iterator)
        except BaseException as exc:
            attempt_all(self.resume, after=exc)  # TRL does not, after an error
            raise

    def resume(self) -> None:
        """Let the requests go on."""
        self._client.resume()

    def destroy(self) -> None:
        """Close the connection."""
        if self._sender is not None:
            self._sender.close()


class ServerWeights:
    """Sends iterators of names and tensors to the workers of the vLLM server at ``url``."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._weights = _OneIterator()
        self._trainer = TransferTrainer(TransferTrainerInit(**settings), client=ServerClient(url), source=self._weights)

    def send(
        self, named: Iterable[_NamedWeight], described: Sequence[tuple[str, str, list[int]]] | None = None
    ) -> None:
        """Send ``named``, ``described`` by name, dtype and shape; without a description, all of it is held first."""
        if described is None:
            named = list(named)
            described = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in named]
        self._weights.described, self._weights.named = described, named
        self._trainer.send_weights()

    def close(self) -> None:
        """Close the connection. May be called again."""
        self._trainer.shutdown()


@dataclass
class _Described:
    name: str
    dtype: torch.dtype
    shape: list[int]


class _OneIterator:
    """The weights of one update, in the form of vLLM's ``WeightSource``."""

    described: Sequence[tuple[str, str, list[int]]] = ()
    named: Iterable[_NamedWeight] = ()

    def metadata(self) -> Iterator[_Described]:
        for name, dtype, shape in self.described:
            yield _Described(name, getattr(torch, dtype), shape)

    def __iter__(self) -> Iterator[_NamedWeight]:
        return iter(self.named)
