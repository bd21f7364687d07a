"""Send weights from TRL's trainers to a vLLM server, by hwrl: :func:`weights_by_hwrl`, :class:`AsyncWeights`.

Start the server by ``vllm serve --weight-transfer-config '{"backend": "hwrl"}'`` with ``VLLM_SERVER_DEV_MODE=1``.
``docs/vllm.md`` and :class:`~hwrl_vllm.TransferTrainerInit` describe the settings.
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
def weights_by_hwrl(*, plain_http: bool = False, **settings: Any) -> Iterator[None]:
    """A context: trainers made in it, with ``vllm_mode="server"``, send their weights by hwrl.

    TRL has no setting for this, so the context replaces TRL's client class until its end. A trainer keeps its client
    after that. Only the main process opens a connection. ``settings`` are those of
    :class:`~hwrl_vllm.TransferTrainerInit`, such as ``host``; ``plain_http`` is that of
    :class:`~hwrl_vllm.ServerClient`.
    """

    class HwrlClient(VLLMClient):  # type: ignore[misc] # TRL is not followed by the type checker
        """TRL's client of a server, except that hwrl sends the weights."""

        def init_communicator(self, device: Any = 0) -> None:
            self._sender = ServerWeights(self.base_url, plain_http=plain_http, **settings)

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
    """Sends weights to the server at ``url``, as the ``weight_transfer=`` of TRL's AsyncGRPOTrainer.

    Pass one on every rank. Only the main process connects, when training begins. ``settings`` are those of
    :class:`~hwrl_vllm.TransferTrainerInit`, and ``plain_http`` is that of :class:`~hwrl_vllm.ServerClient`. An update
    stops running requests, and they continue with the new weights.

    A failed update raises the errors of :class:`~hwrl_vllm.TransferTrainer`, and the requests continue with the old
    weights. After a failed load, or with ``keep_old_version=False``, the server may have weights of two versions. Then
    its requests stay stopped until an update succeeds.
    """

    def __init__(self, url: str, *, plain_http: bool = False, **settings: Any) -> None:
        self._url, self._plain_http, self._settings = url, plain_http, settings
        self._client = ServerClient(url, plain_http=plain_http)
        self._sender: ServerWeights | None = None

    def init_weight_transfer(self) -> None:
        """Connect to all workers of the server. Blocks until they have joined."""
        self._sender = ServerWeights(self._url, plain_http=self._plain_http, **self._settings)

    def pause(self) -> None:
        """Stop the server's requests where they are, and empty its prefix cache."""
        self._client.pause(mode="keep")

    def send_weights(self, iterator: Iterator[_NamedWeight]) -> None:
        """Send the weights. Return when every worker has loaded them."""
        assert self._sender is not None, "TRL calls init_weight_transfer first"
        try:
            self._sender.send(iterator)
        except BaseException as exc:
            if self._sender.has_whole_version:
                attempt_all(self.resume, after=exc)  # after an error TRL does not resume
            raise

    def resume(self) -> None:
        """Let the requests continue."""
        self._client.resume()

    def destroy(self) -> None:
        """Close the connection, if there is one."""
        if self._sender is not None:
            self._sender.close()


class ServerWeights:
    """Sends iterators of names and tensors to the workers of the vLLM server at ``url``."""

    def __init__(self, url: str, *, plain_http: bool, **settings: Any) -> None:
        self._weights, client = _OneIterator(), ServerClient(url, plain_http=plain_http)
        self._trainer = TransferTrainer(TransferTrainerInit(**settings), client=client, source=self._weights)

    def send(
        self, named: Iterable[_NamedWeight], described: Sequence[tuple[str, str, list[int]]] | None = None
    ) -> None:
        """Send ``named``; ``described`` has names, dtypes and shapes. Without it, all tensors are held at once."""
        if described is None:
            named = list(named)
            described = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in named]
        self._weights.described, self._weights.named = described, named
        self._trainer.send_weights()

    @property
    def has_whole_version(self) -> bool:
        """See :attr:`~hwrl_vllm.TransferTrainer.has_whole_version`."""
        return self._trainer.has_whole_version

    def close(self) -> None:
        """Close the connection. May be called again."""
        self._trainer.shutdown()


@dataclass
class _Described:
    """A tensor's name, dtype and shape, as vLLM's sources describe it."""

    name: str
    dtype: torch.dtype
    shape: list[int]


class _OneIterator:
    """The weights of one update, with the interface of vLLM's ``WeightSource``."""

    described: Sequence[tuple[str, str, list[int]]] = ()
    named: Iterable[_NamedWeight] = ()

    def metadata(self) -> Iterator[_Described]:
        for name, dtype, shape in self.described:
            yield _Described(name, getattr(torch, dtype), shape)

    def __iter__(self) -> Iterator[_NamedWeight]:
        return iter(self.named)
