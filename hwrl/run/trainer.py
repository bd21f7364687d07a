"""One rank of the trainer. It combines the engine, the optimizer steps, the weight sender and the checkpoints."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError

from hwrl.checkpoint import rng_state, set_rng_state, share_lock
from hwrl.comm import Comm, PrefixStore, connect_store, is_on_loopback
from hwrl.discovery import get_backend
from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.files import make_directory, replacing
from hwrl.interfaces import PromptGroup
from hwrl.rollout import INCARNATION, decode_text
from hwrl.run.remote import ProcessSetup
from hwrl.run.report.records import Metrics
from hwrl.run.report.run_report import MODEL_DIRECTORY
from hwrl.run.report.samples import Sample, pick_samples
from hwrl.run.report.summary import SENT
from hwrl.run.settings import compute_dtype
from hwrl.train import AsyncTrainer, move_metrics
from hwrl.weights import POLICY_BASE, PolicySender, SyncReport, TransportName, WeightSender, WeightSource

_logger = logging.getLogger(__name__)
PROFILES = "profile"
"""The subdirectory of a run directory that holds profiles."""


@dataclass(frozen=True)
class StepOutcome:
    """The result of a training step: its metrics, and a few of its trajectories as text (only from rank 0)."""

    metrics: Metrics
    samples: list[Sample]


@dataclass(frozen=True)
class RestoredRun:
    """The driver's part of a loaded checkpoint.

    ``ledger`` is the ledger's state. ``skipped`` has the path of each unusable newer checkpoint, with the reason.
    ``changed`` has a sentence for each input file that has changed since the checkpoint and may change.
    """

    step: int
    ledger: dict[str, Any]
    skipped: list[tuple[str, str]]
    changed: list[str]


class TrainerRank:
    """One rank of the trainer. All ranks make the same calls at the same time, except where a method says otherwise.

    The first ``senders`` ranks send the weights. ``incarnation`` is the number of the trainer's starts before this one.
    The constructor waits for the other ranks.
    """

    ALLOCATES: ClassVar[dict[str, str]] = {
        "__init__": "the trainer",
        "restore": "the checkpoint",
        "send_weights": "the transfer of weights",
        "publish_last_weights": "the transfer of weights",
        "step": "a training step",
        "save": "the copy for a checkpoint",
        "export_model": "the export of the model",
        "close": "the end of the trainer",
    }

    def __init__(
        self, setup: ProcessSetup, *, rank: int, incarnation: int, transport: TransportName, senders: int = 1
    ) -> None:
        from hwrl.run import build  # it imports transformers, and the driver imports this module
        from hwrl.run.fit import check_rank
        from hwrl.train import read_model_flops

        config, inputs, ranks = setup.config, setup.inputs, setup.config.train.ranks
        if setup.lock is not None:
            share_lock(config.dir, setup.lock)
        self._config, self._inputs, self._rank = config, inputs, rank
        store = connect_store(setup.store_address)
        timeout_s = build.transfer_timeout_s(config)
        self._group = None
        if ranks > 1:
            ranks_store = PrefixStore(f"train/{incarnation}", store)
            wait_s = 600.0 + 2 * timeout_s  # in it they wait while rank 0 waits for replicas
            self._group = Comm(get_backend()).init_default(store=ranks_store, rank=rank, size=ranks, timeout_s=wait_s)
        check_rank(config, get_backend(), rank=rank, alone=is_on_loopback(store))
        algorithm = build.build_algorithm(config, inputs)
        self._engines = build.build_engines(config, group=self._group, algorithm=algorithm)
        self._engine = self._engines.policy
        bucket_mib = config.weights.update_weights_bucket_megabytes

        def connect(name: str) -> WeightSender:
            return WeightSender(
                store,
                group=self._group,
                name=name,
                transport=transport,
                senders=senders,
                bucket_nbytes=None if bucket_mib is None else bucket_mib << 20,
                versions=1 if name == POLICY_BASE else 3,
                timeout_s=timeout_s,
            )

        self._sender = PolicySender(connect, base=self._engine.base, metadata={INCARNATION: incarnation})
        self._model = WeightSource(self._engine.weights_metadata, self._engine.named_weights)
        self._adapter_weights = WeightSource(self._engine.adapter_metadata, self._engine.named_adapter)
        self._trainer = AsyncTrainer(
            self._engine,
            critic=self._engines.critic,
            algorithm=algorithm,
            max_staleness=config.async_training.staleness_threshold,
            trigger_parameter_sync_step=config.async_training.trigger_parameter_sync_step,
            incarnation=incarnation,
            flops=read_model_flops(config.model.directory, frozen=config.model.lora is not None),
            max_skipped_in_a_row=config.optimizer.max_skipped_in_a_row,
        )
        self._checkpoints = build.build_checkpoints(config, group=self._group)
        self._sent_between_steps: Metrics = {}
        self._further_versions = 0  # after the trainer's own
        steps = config.train.profile_steps if rank == 0 else None
        self._profile = None if steps is None else StepProfile(*steps, directory=config.dir / PROFILES)
        self._tokenizer = build.run_tokenizer(config, inputs) if rank == 0 else None
        self._peak_flops = get_backend().peak_flops(compute_dtype(config))  # once: a backend may read files for it

    # -- training and weights --------------------------------------------------------------------------------------

    def step(self, groups: Sequence[PromptGroup]) -> StepOutcome:
        """Train on ``groups``, and send the weights if they are due. Return the metrics of both and a few samples."""
        samples = self._pick_samples(groups)
        profiled = nullcontext() if self._profile is None else self._profile.recording(self._trainer.steps_done + 1)
        with profiled, self._trainer.stepping() as moved:
            trained = self._trainer.step(groups)
            sent = self._send() if trained.publishes else {}
        critic = self._trainer.train_critic()
        timing = self._trainer.timing()
        speed = trained.speed(
            seconds=timing["timing_s/train"],
            devices=self._config.train.ranks,
            peak_flops=self._peak_flops,
        )
        metrics = {**trained.metrics, **critic, **sent, **move_metrics(moved), **timing, **speed}
        earlier, self._sent_between_steps = self._sent_between_steps, {}
        summed = {name: metrics.get(name, 0.0) + value for name, value in earlier.items()}
        return StepOutcome({**metrics, **summed}, samples)

    def _pick_samples(self, groups: Sequence[PromptGroup]) -> list[Sample]:
        if self._tokenizer is None or not self._config.report.samples_per_step:
            return []
        return pick_samples(
            groups,
            step=self._trainer.steps_done + 1,
            version=self._trainer.version,
            count=self._config.report.samples_per_step,
            decode=partial(decode_text, self._tokenizer, special=True),
        )

    def send_weights(self) -> None:
        """Send the current weights between two steps, with the number of the trainer's newest version.

        With ``trigger_parameter_sync_step`` above 1 the weights may be newer than this number says: a replica that
        joins between two versions gets the weights of the latest step. The LoRA metrics are added to the next step's.
        """
        sent = self._send()
        for name in SENT:
            if name in sent:
                self._sent_between_steps[name] = self._sent_between_steps.get(name, 0.0) + sent[name]

    def publish_last_weights(self) -> None:
        """Send the current weights as a version above the trainer's count; later calls send them as this version too.

        Call it after the last step, if that step published no version. No step may follow: a later step would use the
        same version number for other weights.
        """
        self._further_versions = 1
        self._send()

    def new_receivers(self) -> tuple[str, ...]:
        """Return the replicas that connected after the newest weights were sent. On ranks above 0: nothing."""
        return self._sender.new_receivers()

    def _send(self) -> Metrics:
        """Send the weights of all ranks as the newest version, and return the metrics of the transfer."""
        version = self._trainer.version + self._further_versions
        with get_backend().range("hwrl.sync"), self._trainer.sending():
            report = self._sender.send(version, model=self._model, adapter=self._adapter_weights)
        return _sync_metrics(report)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def finished_step(self) -> int | None:
        """Return the step whose result the models have; None if they have changed only in part since then."""
        return self._trainer.finished_step

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being saved in the background. Any thread may ask."""
        return self._checkpoints.is_saving

    def save(self, ledger: dict[str, Any]) -> Metrics:
        """Save a checkpoint of the current state and the ledger's state; return how long the trainer waited for it."""
        with self._trainer.saving(), self._engines.saved_state() as (state, offloader):
            report = self._checkpoints.save(
                self._trainer.steps_done,
                state,
                offloader=offloader,
                extra={
                    "trainer": self._trainer.state_dict(),
                    "ledger": ledger,
                    "inputs": self._inputs.digests(),
                    "adapter": self._adapter(),
                    "export": self._of_export(),
                },
                rank_extra={"rng": rng_state(get_backend())},
                weight_version=self._trainer.version,
            )
        return {"checkpoint/blocked_s": report.blocked_s, "checkpoint/waited_s": report.waited_s}

    def wait_for_save(self) -> None:
        """Wait for a save in the background. Raises its error if it failed."""
        self._checkpoints.wait()

    def restore(self) -> RestoredRun | None:
        """Load the newest complete checkpoint; return None if there is none."""
        with self._engines.on_device():
            state = self._engines.state_dict()
            resumed = self._checkpoints.resume(state)
            if resumed is None:
                return None
            changed = self._inputs.compare_with_checkpoint(resumed.extra)
            self._check_base(resumed.extra["adapter"])
            self._engines.load_state_dict(state)
        self._trainer.load_state_dict(resumed.extra["trainer"])
        if self._rank < len(resumed.rank_extras):  # other ranks did not exist in the saved run; they keep their state
            set_rng_state(resumed.rank_extras[self._rank]["rng"], get_backend())
        skipped = [(str(checkpoint.path), checkpoint.reason) for checkpoint in resumed.skipped]
        return RestoredRun(resumed.step, resumed.extra["ledger"], skipped, changed)

    def _adapter(self) -> dict[str, Any] | None:
        """Return what identifies the adapter in a checkpoint; None if the whole model is trained."""
        lora = self._config.model.lora
        return None if lora is None else {"base": self._engine.base, "config": lora.peft_config()}

    def _of_export(self) -> dict[str, Any]:
        """Return what an export needs from the run, beside the weights."""
        data = self._config.data
        changed = data.chat_template is not None or data.chat_template_kwargs
        template = self._tokenizer.chat_template if changed and self._tokenizer is not None else None
        return {"max_length": self._config.max_model_len, "chat_template": template}

    def _check_base(self, saved_adapter: dict[str, Any] | None) -> None:
        saved_base = None if saved_adapter is None else saved_adapter["base"]
        if saved_base != self._engine.base:
            raise ConfigError(
                f"the checkpoint's adapter does not belong to the model in {self._config.model.path}",
                why="it was trained on another base model: the model's configuration or weights have changed",
                fix="restore the old model, or start a new run in another dir=…",
            )

    # -- the end ---------------------------------------------------------------------------------------------------

    def export_model(self) -> None:
        """Write the trained model to the run directory, in the format of transformers."""
        directory = self._config.dir / MODEL_DIRECTORY
        try:
            make_directory(directory)  # raises for a file; transformers would silently write nothing
            for path in filter(Path.is_symlink, directory.iterdir()):
                path.unlink()  # transformers would write to its target
            with self._engine.on_device(optimizer=False):
                self._engine.export(directory)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(directory)  # with the run's chat template
        except (OSError, SafetensorError) as exc:
            raise RunDirectoryError(
                f"the trained model cannot be written to {directory}",
                why=str(exc),
                fix="repair the cause in the run directory; resume=true then writes the model",
            ) from exc

    def close(self) -> None:
        """Wait for a save in the background, close all connections and write a profile. Raises if the save failed."""
        try:
            self._checkpoints.close()
        finally:
            self._sender.close()
            self._engines.close()
            if self._group is not None:
                self._group.close()
        if self._profile is not None:
            self._profile.finish()  # of a run that ends before the last of train.profile_steps


def _sync_metrics(report: SyncReport) -> Metrics:
    """Return the metrics of a transfer. If a base was sent as well, its bytes and seconds are added to the policy's."""
    transfers = [report.policy] if report.base is None else [report.policy, report.base]
    stages = dict.fromkeys(stage for transfer in transfers for stage in transfer.seconds)
    metrics = {
        "sync/nbytes": float(sum(transfer.nbytes for transfer in transfers)),
        "sync/receivers": float(report.policy.receivers),
        "sync/excluded": float(sum(len(transfer.excluded) for transfer in transfers)),
        **{f"sync/{stage}_s": sum(transfer.seconds.get(stage, 0.0) for transfer in transfers) for stage in stages},
    }
    if report.policy.changed_share is not None:
        metrics["weights/changed_share"] = report.policy.changed_share
    if report.plan.what == "full":
        return metrics
    sent = (report.base is not None, report.base.nbytes if report.base else 0, report.policy.nbytes)
    return {**metrics, **dict(zip(SENT, map(float, sent), strict=True))}


class StepProfile:
    """Records torch's profiler from step ``first`` to step ``last``, and writes ``steps_<from>-<to>.json.gz``.

    The file is a Chrome trace. A run that resumes between these steps records the remaining ones, and :meth:`finish`
    writes the file of a run that ends between them. An error of the profiler is a warning in the log, and ends the
    profile only. All calls must come from the same thread; torch requires this.
    """

    def __init__(self, first: int, last: int, *, directory: Path) -> None:
        self._first, self._last, self._directory = first, last, directory
        self._profiler: torch.profiler.profile | None = None
        self._recorded: list[int] = []
        self._has_failed = False

    @contextlib.contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the block as ``step`` if the step is in the range. Write the file after the last step of the range."""
        if self._first <= step <= self._last and not self._has_failed:
            with self._warning():
                if self._profiler is None:
                    profiler = torch.profiler.profile()
                    profiler.start()
                    self._profiler = profiler
            self._recorded.append(step)
        yield
        if step == self._last:
            self.finish()

    def finish(self) -> None:
        """Write the file if that is still to do."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        path = self._directory / f"steps_{self._recorded[0]}-{self._recorded[-1]}.json.gz"
        with self._warning():
            profiler.stop()
            make_directory(self._directory)
            with replacing(path) as file:
                profiler.export_chrome_trace(file.name)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a profiler may raise anything
            self._has_failed = True
            _logger.warning("the profiler failed (%s: %s); there is no profile", type(exc).__name__, exc)
