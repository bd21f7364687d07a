"""The worker's end of vLLM's weight transfer, with the backend "hwrl" of ``--weight-transfer-config``."""

from __future__ import annotations

import functools
import json
import logging
import pkgutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hwrl.comm import connect_store
from hwrl.discovery import engine_args, get_backend
from hwrl.errors import ConfigError, EngineError
from hwrl.interfaces import WeightOffer
from hwrl.rollout import require_same_model
from hwrl.saved_names import saved_weights
from hwrl.weights import EngineReceiver, Taken
from hwrl_vllm.loading import ModelLoading
from hwrl_vllm.plugin import BACKEND
from hwrl_vllm.trainer import WORKERS, answer_key

_log = logging.getLogger("vllm.hwrl")  # vLLM's logger shows its messages


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM's types are not followed
    """What a worker needs to join a trainer.

    ``store`` is the address of the trainer's store, with its key. With ``keep_old_version`` the old version serves
    until all workers have the new one.
    """

    store: str = field(repr=False)
    keep_old_version: bool = True


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # likewise
    """One call of the trainer, with the number ``call``. It has one of three tasks.

    With ``shapes`` a worker checks the names and shapes of the trainer's weights. With ``offer``, the fields of a
    WeightOffer, it receives a version. With ``install`` it loads the version that it has received.
    """

    call: int
    shapes: dict[str, list[int]] = field(default_factory=dict)
    offer: dict[str, Any] | None = field(default=None, repr=False)  # not in logs: it has the store's key
    install: int = 0
    """The number of the proposal of the version to load."""


class TransferWorker(WeightTransferEngine[TransferInit, TransferUpdate]):  # type: ignore[misc]  # likewise
    """Receives versions in one worker of vLLM, at any ``tensor_parallel_size``. vLLM makes it and calls it.

    The calls return no results, so a worker writes its answers into the trainer's store. The methods for a join and an
    update catch every Exception and put it into the answer. If two workers raised errors, vLLM would read the first
    only, take the second for the answer to the next call, and end.
    """

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    supports_draft_weight_update = False
    _receiver: EngineReceiver | None = None
    _taken = Taken()
    _is_updating = _keeps_old = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if not hasattr(self, "vllm_config"):
            raise ConfigError(
                f"--weight-transfer-config with the backend {BACKEND!r} cannot be used",
                why="this vLLM calls its weight-transfer backends in another way than vLLM 0.25 and newer",
                fix="use vLLM 0.25 or newer",
            )
        worker = pkgutil.resolve_name(self.vllm_config.parallel_config.worker_cls)
        if worker.update_weights.__module__.partition(".")[0] != "vllm":
            raise ConfigError(
                f"--weight-transfer-config with the backend {BACKEND!r} cannot be used",
                why=f"{worker.__module__}.{worker.__name__} calls weight-transfer backends in another way than vLLM: "
                "without their start and end of an update",
                fix="let hwrl start the engine (rollout.engine=vllm): its workers take weights by a way of hwrl's own",
            )
        self._require_device_settings()

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        config = self.vllm_config.parallel_config
        try:
            self.shutdown()
            self._store, backend = connect_store(init_info.store), get_backend()
            self._keeps_old = init_info.keep_old_version
            place = self.loading.stage if self._keeps_old else self.loading.place
            self._number = int(self._store.add(WORKERS, 1)) - 1
            self._receiver = EngineReceiver(self._number, backend=backend, make_destination=place)
        except Exception:  # noqa: BLE001 - the trainer notices the missing answer
            trainer = init_info.store.partition("#")[0]  # the log must not have the key
            _log.exception("this worker cannot join the trainer at %s", trainer)
            return
        self._answer(0, {"rank": config.rank, "of": config.world_size, "updating": self._is_updating})

    def start_weight_update(self) -> None:
        self._is_updating = True

    def receive_weights(self, update_info: TransferUpdate) -> None:
        try:
            taken = self._do(update_info)
        except Exception as exc:  # noqa: BLE001 - the answer has it
            taken = Taken(why=f"{type(exc).__name__}: {exc}", fault=True)
        self._answer(update_info.call, taken._asdict())

    def finish_weight_update(self) -> None:
        self._is_updating, self._taken = False, Taken()
        self.loading.drop()
        if self._receiver is not None and self._keeps_old:
            self._receiver.release()

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise NotImplementedError. vLLM before 0.28 requires this method; hwrl's trainer's end is TransferTrainer."""
        raise NotImplementedError("send weights by hwrl_vllm.TransferTrainer")

    def _require_device_settings(self) -> None:
        """Raise ConfigError unless vLLM was started with what live updates need on this device."""
        name = "additional_config"
        given: Any = self.vllm_config.additional_config or {}
        needed = engine_args("vllm", {name: given}).get(name, given)
        if needed != given:
            raise ConfigError(
                f"weights of this vLLM cannot be updated: its --{name.replace('_', '-')} lacks a setting",
                why=f"it is {json.dumps(given)}, and live updates need {json.dumps(needed)} on this device",
                fix=f"start vLLM with --{name.replace('_', '-')} '{json.dumps(needed)}'",
            )

    def _do(self, update: TransferUpdate) -> Taken:
        """Do the task of ``update``. The result is empty unless the task is to take an offer."""
        if self._receiver is None:
            raise EngineError(
                "this worker has joined no trainer", why="its log has it", fix="make a new TransferTrainer"
            )
        if update.shapes:
            self._check(update.shapes)
        elif update.offer is not None:
            self._taken = self._receiver.take(WeightOffer(**update.offer))
            return self._taken
        elif update.install == self._taken.proposal:
            self.loading.install()
        else:
            raise EngineError(f"proposal {update.install} is not here", why=f"{self._taken}", fix="send it again")
        return Taken()

    def _check(self, shapes: dict[str, list[int]]) -> None:
        """Raise EngineError if ``shapes`` are another model's; nothing is overwritten then.

        Checks nothing if transformers does not know the architecture.
        """
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.model_config.hf_config, trust_remote_code=False)
        except ValueError as exc:
            _log.warning("the names of weights are left to vLLM's loaders: transformers has no such model: %s", exc)
            return
        given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        require_same_model(saved_weights(model)[0], given)

    def _answer(self, call: int, answer: dict[str, Any]) -> None:
        with suppress(Exception):  # the trainer has ended, or this worker has never joined
            self._store.set(answer_key(call, self._number), json.dumps(answer))

    @functools.cached_property
    def loading(self) -> ModelLoading:
        """Loads versions into this worker's model."""
        return ModelLoading(self.model, model_config=self.model_config, vllm_config=self.vllm_config)
