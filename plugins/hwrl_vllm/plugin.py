"""The function :func:`load`, which vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

from contextlib import suppress

from hwrl_vllm.orphans import end_with_owner

BACKEND = "hwrl"
"""The backend's name in ``--weight-transfer-config``."""


def load() -> None:
    """Register the weight-transfer backend. In a process that hwrl's engine started, also watch the owner.

    The owner is the rollout process. When it ends, this process ends, too. vLLM may call this twice in a process.
    """
    end_with_owner()
    register_transfer()


def register_transfer() -> None:
    """Register the worker's end and the trainer's end with vLLM's factories, if this version of vLLM has them."""
    with suppress(ImportError):  # before 0.25 the worker's end has another interface
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        _register(WeightTransferEngineFactory, "hwrl_vllm.transfer", "TransferWorker")
    with suppress(ImportError):  # before 0.26 there is no factory for the trainer's end
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        _register(WeightTransferTrainerFactory, "hwrl_vllm.trainer", "TransferTrainer")


def _register(factory: type, module: str, name: str) -> None:
    with suppress(ValueError):  # it is registered already
        factory.register_engine(BACKEND, module, name)  # type: ignore[attr-defined]  # vLLM's
