"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

from contextlib import suppress

from hwrl_vllm.orphans import end_with_owner

BACKEND = "hwrl"
"""The backend's name in ``--weight-transfer-config``."""


def load() -> None:
    """Let a process of hwrl's engine end with its owner, and register the weight-transfer backend.

    vLLM may call this twice in a process.
    """
    end_with_owner()
    register_transfer()


def register_transfer() -> None:
    """Register both ends of the backend with vLLM's factories, as far as this version of vLLM has them."""
    with suppress(ImportError):  # before 0.25 the worker's end has another form
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        _register(WeightTransferEngineFactory, "hwrl_vllm.transfer", "TransferWorker")
    with suppress(ImportError):  # before 0.26
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        _register(WeightTransferTrainerFactory, "hwrl_vllm.trainer", "TransferTrainer")


def _register(factory: type, module: str, name: str) -> None:
    with suppress(ValueError):  # it is registered already
        factory.register_engine(BACKEND, module, name)  # type: ignore[attr-defined]  # vLLM's
