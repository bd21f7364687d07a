""":class:`CheckpointManager`: saves a training state. After a crash at any point there is a complete one to resume."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory, os_errors_as_checkpoint_errors
from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.format.extra import copy_extra
from hwrl.checkpoint.format.loading import SavedTensors
from hwrl.checkpoint.format.manifest import CheckpointInfo, find_checkpoints
from hwrl.checkpoint.resume import Resumed, ResumeProtocol
from hwrl.checkpoint.saving.agreement import Agreement
from hwrl.checkpoint.saving.inventory import take_inventory
from hwrl.checkpoint.saving.nodes import join_node
from hwrl.checkpoint.saving.save import SaveProtocol
from hwrl.checkpoint.saving.stages import CapturedSave
from hwrl.checkpoint.saving.staging import StagingMemory
from hwrl.checkpoint.saving.state import CapturedState, capture_state
from hwrl.checkpoint.saving.tuning import SaveTuning
from hwrl.comm import Group, PrefixStore
from hwrl.discovery import backend_or_default
from hwrl.errors import CheckpointError, CheckpointSaveError, ConfigError
from hwrl.interfaces import Backend, OffloadedState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """What a call of ``save`` cost the caller.

    Seconds: ``waited_s`` for the previous save, and ``blocked_s`` from then until ``save`` returned. Bytes:
    ``cloned_nbytes`` copied within the device, ``staged_nbytes`` copied to the host (both 0 in the foreground),
    ``lent_nbytes`` read from an offloader's copies instead, and ``held_nbytes`` of host memory kept for this save
    and later ones.
    """

    waited_s: float
    blocked_s: float
    cloned_nbytes: int
    staged_nbytes: int
    lent_nbytes: int
    held_nbytes: int


class CheckpointManager:
    """The one writer of a directory of checkpoints.

    ``max_ckpt_to_keep`` newest checkpoints stay; None keeps all. With ``async_save``, ``save`` copies the state and a
    background thread writes the copy; the next call raises the thread's error. ``staging`` says where the copy lies:
    "host" is page-locked memory, kept from save to save; "device" is device memory that the process has not needed
    for anything else so far, freed while the copy is written. Tensors that do not fit there are staged on the host.

    All ranks of ``group`` save together. They make the same calls in the same order. They share one directory, or the
    ranks of each node have one on its own disk. A rank without a heartbeat for ``timeout_s`` counts as lost; otherwise
    it may take any time to write. ``fs`` makes every change of the disk.

    The arguments of ``save``: ``state`` is a nested dict of tensors, DTensors, :class:`LocalShards` and plain values,
    as ``get_state_dict`` of ``torch.distributed.checkpoint.state_dict`` returns it. ``extra`` is JSON with string keys,
    taken from rank 0; ``rank_extra`` is the same for each rank.

    ``export`` writes files for other readers. It is called once, on rank 0, when the tensors of rank 0's node are
    written. It gets the path of the empty directory ``hf`` inside the checkpoint, and the :class:`SavedTensors`. They
    are read from the files one at a time, so an export needs no copy of the model.

    ``after_commit`` is called once, on rank 0, when all nodes have the step under its final name, and the tracker names
    it; the checkpoints that retention will remove are still there. It gets the checkpoint. Other programs' trackers can
    so follow. If it raises, the step stays complete, and ``save`` raises on all ranks (with ``async_save``, the next
    call). It is not called again for this step, nor for a step whose writer died between the commit and the call.

    With ``async_save`` both run in the background, so they must own their other data and call no collective. They must
    not call the manager.

    ``offloader`` holds tensors of the state on the host; they are written from there, neither loaded nor copied. Take
    the state inside ``offloader.lending()`` then. The offloader may be used at once: before an ``offload`` overwrites a
    tensor, it waits until the tensor is written. Until the ranks have divided the work, it waits for all tensors.

    Timeline: opening takes the directory's lock and removes the drafts of dead writers. ``resume`` comes first, then
    any number of ``save``. ``close``, or leaving the context, waits for a running save and releases the lock.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_ckpt_to_keep: int | None = None,
        async_save: bool = False,
        staging: Literal["host", "device"] = "host",
        group: Group | None = None,
        backend: Backend | None = None,
        timeout_s: float = 120.0,
        fs: DurableFS | None = None,
        tuning: SaveTuning | None = None,
    ) -> None:
        _check_options(max_ckpt_to_keep, staging, async_save=async_save)
        tuning = tuning or SaveTuning()
        fs = fs or DurableFS()
        self.directory = Path(directory).absolute()
        self._async_save, self._closed, self._calls = async_save, False, 0
        self._staging = StagingMemory(backend_or_default(backend), tuning, on_device=staging == "device")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hwrl-checkpoint")
        self._background_save: Future[None] | None = None
        self._agreement = _agreement_of(group, timeout_s)
        node = join_node(self.directory, fs, self._agreement, look_s=tuning.look_s)
        self._locked_directory: CheckpointDirectory | None = None
        try:
            with self._agreement.vote():
                if node.agreement.leads:
                    self._locked_directory = CheckpointDirectory(self.directory, fs)
            newest = take_inventory(self._agreement, self._locked_directory).newest
            with self._agreement.vote():
                self._correct_tracker(newest)
        except Exception:
            self._release_directory()
            raise
        failed_verification: list[Path] = []
        self._saving = SaveProtocol(
            path=self.directory,
            agreement=self._agreement,
            node=node,
            directory=self._locked_directory,
            fs=fs,
            keep=max_ckpt_to_keep,
            tuning=tuning,
            failed_verification=failed_verification,
        )
        self._resuming = ResumeProtocol(self.directory, self._agreement, node, failed_verification)

    def _correct_tracker(self, newest: int) -> None:
        """Have the tracker name the newest complete checkpoint: its writer may have died before it did so.

        A reader fails if the tracker names an incomplete checkpoint, and silently starts afresh if there is none.
        """
        if self._locked_directory is not None and newest >= 0:
            with os_errors_as_checkpoint_errors(self.directory):
                self._locked_directory.set_tracker(newest)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        weight_version: int = 0,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Mapping[str, Any] | None = None,
        export: Callable[[Path, SavedTensors], object] | None = None,
        after_commit: Callable[[CheckpointInfo], object] | None = None,
        offloader: OffloadedState | None = None,
    ) -> SaveReport:
        """Save ``state`` as ``step``. It must be later than every complete step in the directory.

        Without ``async_save`` the checkpoint is complete and durable when this returns. With it, the caller may change
        the state as soon as this returns; the call first waits for a previous save. The class docstring has the
        arguments.

        Raises :class:`~hwrl.errors.CheckpointSaveError` if this save, or the previous one in the background, failed.
        The checkpoints before it are untouched and the next save may succeed. If this call raises the previous
        failure, it saves nothing, unless another rank has raised it before and continues.
        """
        call = self._begin_call(f"step {step} cannot be saved", CheckpointSaveError)
        started_s = time.perf_counter()
        previous_error = self._previous_error()
        if previous_error is not None and len(self._agreement.ranks) == 1:
            raise previous_error
        waited_s = time.perf_counter()
        with self._refusing(call, step):
            captured = CapturedSave(
                call=call,
                step=_count("step", step),
                weight_version=_count("weight_version", weight_version),
                extra=copy_extra(extra),
                rank_extra=copy_extra(rank_extra),
                export=export,
                after_commit=after_commit,
                previous_save_succeeded=previous_error is None,
                state=capture_state(state, self._staging, copy=self._async_save, offloader=offloader),
            )
        if self._async_save:
            self._save_in_background(captured)
        else:
            self._saving.save(captured)
        if previous_error is not None:
            raise previous_error
        blocked_s = time.perf_counter() - waited_s
        return _report(captured.state, self._staging, waited_s=waited_s - started_s, blocked_s=blocked_s)

    @contextlib.contextmanager
    def _refusing(self, call: int, step: int) -> Iterator[None]:
        """If the block raises, raise the error on the other ranks too: they wait for this one."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - refuse raises it again
            self._saving.refuse(call, step, exc)
        except BaseException as exc:
            with contextlib.suppress(Exception):
                self._saving.refuse(call, step, RuntimeError(f"interrupted by {exc!r}"))
            raise

    def _save_in_background(self, captured: CapturedSave) -> None:
        try:
            self._background_save = self._thread.submit(self._saving.save, captured)
            self._background_save.add_done_callback(_log_failure)
        except BaseException:  # an interrupt, perhaps after the thread took the save; or the thread takes no work
            with contextlib.suppress(RuntimeError):
                self._thread.submit(int).result()
            captured.state.close()
            raise

    def _previous_error(self) -> Exception | None:
        """Wait for the save in the background; return its error."""
        try:
            self.wait()
        except Exception as exc:  # noqa: BLE001 - raised by the caller
            return exc
        return None

    def _begin_call(self, what: str, error: type[CheckpointError]) -> int:
        """Return the number of this call. All ranks make it, however it ends on each."""
        if self._closed:
            raise error(what, why="the manager is closed", fix="open another")
        self._calls += 1
        return self._calls

    @property
    def is_saving(self) -> bool:
        """Whether a save is running in the background; its ``after_commit`` is a part of it."""
        return self._background_save is not None and not self._background_save.done()

    def wait(self) -> None:
        """Block until no save is running; raise the error of a failed save. May be called again if interrupted."""
        if self._background_save is None:
            return
        error = self._background_save.exception()
        self._background_save = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for a running save, raise its error, and release the directory. May be called again."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._thread.shutdown()
            self._agreement.close()
            self._staging.close()
            self._release_directory()

    def _release_directory(self) -> None:
        locked, self._locked_directory = self._locked_directory, None
        if locked is not None:
            locked.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            self.close()
        except CheckpointSaveError:
            if kind is None:
                raise
            _log.exception("the last save failed too")  # the error of the block is raised: it says more

    # -- finding and loading ------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints intact on this disk, oldest first. Sizes are checked, hashes are not."""
        return find_checkpoints(self.directory)[0]

    def resume(self, state: dict[str, Any], *, step: int | None = None) -> Resumed | None:
        """Load the newest good checkpoint, or exactly ``step``, into ``state``. Return None if there is none at all.

        ``state`` has the structure of the saved state, perhaps sharded over another number of ranks. Its tensors are
        overwritten in place, other values replaced. The hash of every file is verified before anything is loaded, and
        no pickle is executed. A bad checkpoint is skipped, logged and reported in ``skipped``. If a hash is wrong, the
        next ``save`` renames it to ``.broken_…``: its step can be saved again, and nothing is lost. If a file is
        missing or has the wrong size, or the manifest is bad, it keeps its name until its step is saved again: another
        program may own it.

        Raises :class:`~hwrl.errors.CheckpointNotFoundError` if there are checkpoints but none is good (training never
        starts afresh silently); :class:`~hwrl.errors.CheckpointError` if the checkpoint does not fit ``state``;
        :class:`~hwrl.errors.CheckpointCorruptError` if ``step`` is damaged, or if files match their hashes but cannot
        be read. Only in the last case may ``state`` be partly overwritten.
        """
        call = self._begin_call("nothing can be loaded", CheckpointError)
        previous_error = self._previous_error()
        self._agreement.begin_call(call)
        if previous_error is not None:
            with self._agreement.vote():  # the other ranks may have no error: they begin the inventory
                raise previous_error
        inventory = take_inventory(self._agreement, self._locked_directory)
        return self._resuming.resume(state, inventory, step=step)


def _check_options(max_ckpt_to_keep: int | None, staging: str, *, async_save: bool) -> None:
    if max_ckpt_to_keep is not None and max_ckpt_to_keep < 1:
        raise ConfigError(
            f"max_ckpt_to_keep={max_ckpt_to_keep} is not possible",
            why="the newest checkpoint is never deleted",
            fix="give 1 or more, or null to keep all",
        )
    if staging not in ("host", "device"):
        raise ConfigError(
            f"staging={staging!r} is not possible",
            why="a state is staged on the host or on the device",
            fix='give "host" or "device"',
        )
    if staging == "device" and not async_save:
        raise ConfigError(
            "staging on the device is not possible without async_save",
            why="a save in the foreground is not staged",
            fix='give async_save=True, too, or staging="host"',
        )


def _agreement_of(group: Group | None, timeout_s: float) -> Agreement:
    if not isinstance(group, Group | None):
        raise ConfigError(
            f"group={group!r} is not possible",
            why="ranks agree over the store of an hwrl.comm.Group",
            fix="give hwrl.comm.Comm().default_group(), or .new_group(ranks) for some of its ranks",
        )
    if group is None:
        return Agreement(None, rank=0, ranks=[0], timeout_s=timeout_s)
    # All ranks open their managers in the same order.
    opened = group.store.add(f"hwrl/checkpoint/opened/{group.rank}", 1)
    store = PrefixStore(f"hwrl/checkpoint/{opened}", group.store)
    return Agreement(store, rank=group.rank, ranks=range(group.size), timeout_s=timeout_s)


def _report(state: CapturedState, staging: StagingMemory, *, waited_s: float, blocked_s: float) -> SaveReport:
    return SaveReport(
        waited_s=waited_s,
        blocked_s=blocked_s,
        cloned_nbytes=state.cloned_nbytes,
        staged_nbytes=state.staged_nbytes,
        lent_nbytes=state.lent_nbytes,
        held_nbytes=staging.nbytes,
    )


def _log_failure(saving: Future[None]) -> None:
    """Log the error at once. The next call raises it, but the program may end without another call."""
    error = saving.exception()
    if error is not None:
        _log.error("a save in the background failed: %s", error)


def _count(name: str, value: Any) -> int:
    """Return ``value`` as an integer for the manifest."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (count := operator.index(value)) >= 0:
            return count
    raise CheckpointSaveError(
        f"{name}={value!r} cannot be saved", why="it is no integer, or less than 0", fix="count from 0, in integers"
    )
