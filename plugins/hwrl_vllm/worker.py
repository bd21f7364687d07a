"""hwrl's extension of vLLM's workers: it receives or loads whole versions into the running model."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hwrl.discovery import get_backend
from hwrl.interfaces import Backend, WeightOffer
from hwrl.weights import CopyDestination, Destination, EngineReceiver, Taken, WeightLayout
from hwrl_vllm.loading import ModelLoading
from hwrl_vllm.lora import keep_indices, layers_without_place, replace_adapter

if TYPE_CHECKING:
    from hwrl_vllm.sleep import PooledSleep


@dataclass(frozen=True)
class LentWeights:
    """Tensors in the rollout process's memory that a worker process can open: one handle for each storage."""

    handles: list[dict[str, str | int]]
    places: dict[str, tuple[int, int, torch.dtype, torch.Size]]
    """For each tensor: the index of its handle, its first byte in the storage, its dtype and its shape."""

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], backend: Backend) -> LentWeights:
        """Lend ``weights``; each must be contiguous and not empty. The handles are valid while the tensors exist."""
        handles: dict[int, dict[str, str | int]] = {}
        places = {}
        for name, tensor in weights.items():
            storage = tensor.untyped_storage()
            if storage._cdata not in handles:
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                handles[storage._cdata] = backend.export_memory(memory)
            number = list(handles).index(storage._cdata)
            begin = int(tensor.storage_offset()) * tensor.itemsize
            places[name] = (number, begin, tensor.dtype, tensor.shape)
        return cls(list(handles.values()), places)

    def open(self, backend: Backend) -> dict[str, torch.Tensor]:
        """Return the tensors. Call this in another process; they share the lender's memory."""
        opened = [backend.open_memory(handle) for handle in self.handles]
        return {
            name: opened[number][begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (number, begin, dtype, shape) in self.places.items()
        }


class WeightLoading:
    """A mixin for vLLM's worker (``worker_extension_cls``). The engine calls it through vLLM's ``collective_rpc``."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    rank: int
    _hwrl_sleep: PooledSleep | None = None

    @functools.cached_property
    def _hwrl_receiver(self) -> EngineReceiver:
        return EngineReceiver(self.rank, backend=get_backend(), make_destination=self._hwrl_place)

    def _hwrl_place(self, layout: WeightLayout) -> Destination:
        """Return the destination for versions of ``layout``, in place. vLLM's loaders may leave some weights alone."""
        destination = self.hwrl_loading.place(layout)
        if self._hwrl_sleep is not None and not isinstance(destination, CopyDestination):
            self._hwrl_sleep.restore()
        return destination

    def hwrl_load_lent(self, pickled: bytes) -> None:
        """Do :meth:`hwrl_load` with another process's tensors. ``pickled`` is a pair of LentWeights and ``adapter``."""
        lent, adapter = pickle.loads(pickled)
        self.hwrl_load(lent.open(get_backend()), adapter)

    def hwrl_follow_logprobs_mode(self) -> None:
        """Set the sampler to the engine's ``logprobs_mode``. vllm-ascend 0.26 makes its own without this setting."""
        mode, sampler = self.model_config.logprobs_mode, self.model_runner.sampler
        for part in (sampler, getattr(sampler, "topk_topp_sampler", sampler)):
            if hasattr(part, "logprobs_mode"):
                part.logprobs_mode = mode

    def hwrl_record(self, pickled: bytes) -> None:
        """Record how vLLM's loaders bring weights into the model. The engine has no weights at this time.

        ``pickled`` has the dtype and shape of each of the model's weights, by name. The loaders get host tensors
        without values. A loader reads one only if it computes with it, so they need no physical memory otherwise. The
        model's weights are arbitrary afterwards.
        """
        described: Mapping[str, tuple[torch.dtype, torch.Size]] = pickle.loads(pickled)
        weights = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in described.items()}
        self.hwrl_loading.record(weights, skips_copies=True)

    def hwrl_receive(self, pickled: bytes) -> Taken | None:
        """Receive ``pickled``, a WeightOffer, into this worker's weights; None if it is not for this worker. Blocks."""
        offer: WeightOffer = pickle.loads(pickled)
        if offer.members[self.rank] is None:
            return None
        taken = self._hwrl_receiver.take(offer)
        copies = self.hwrl_loading.copies
        if taken.proposal and self._hwrl_sleep is not None and copies is not None:
            self._hwrl_sleep.replaced(target for target, _ in [*copies.copies, *copies.constants])
        return taken

    def hwrl_load(self, weights: Mapping[str, torch.Tensor], adapter: Mapping[str, Any] | None) -> None:
        """Load contiguous ``weights`` of the whole model in place; this worker takes its shards of them. Blocks.

        With ``adapter``, PEFT's config, ``weights`` are a whole adapter under PEFT's names. After a failure the model
        has weights of two versions. The next whole load repairs it.
        """
        if self._hwrl_sleep is not None:
            self._hwrl_sleep.restore()
        if adapter is None:
            self.hwrl_loading.load(weights)
            return
        replace_adapter(self.model_runner.lora_manager, weights, adapter)
        get_backend().synchronize()

    def hwrl_layers_without_place(self, names: Collection[str]) -> list[str]:
        """Return the layers that cannot have an adapter in this model. ``names`` are those of an adapter's tensors."""
        return layers_without_place(self.model_runner.lora_manager, names)

    def hwrl_release_receiver(self) -> None:
        """Free the receiver's ring, before a sleep."""
        self._hwrl_receiver.release(keep_plan=True)

    def hwrl_free_nbytes(self) -> int:
        """Return the free bytes of this worker's device."""
        return get_backend().memory_info().free_nbytes

    def hwrl_prepare_sleep(self) -> None:
        """Prepare for sleeps: keep index tensors, and use hwrl's sleep backend if this vLLM has a registry of them."""
        keep_indices(self.model_runner.get_model())
        if hasattr(self, "_sleep_mode_backend"):
            from hwrl_vllm.sleep import pooled_sleep

            self._sleep_mode_backend = self._hwrl_sleep = pooled_sleep(self.model_config)

    @functools.cached_property
    def hwrl_loading(self) -> ModelLoading:
        """Loads versions into this worker's model."""
        model = self.model_runner.get_model()
        return ModelLoading(model, model_config=self.model_config, vllm_config=self.vllm_config)
