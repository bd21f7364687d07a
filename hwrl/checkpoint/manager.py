"""Saves and resumes a training state: :class:`CheckpointManager`.

From the first commit on, a crash at any point leaves a complete checkpoint to resume from.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from hwrl.checkpoint.agreement import agreement_of
from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.load import SavedTensors
from hwrl.checkpoint.manifest import CheckpointInfo, copy_extra, find_checkpoints
from hwrl.checkpoint.nodes import open_shared
from hwrl.checkpoint.parts import require_parts, rng_state, set_rng_state, take_state
from hwrl.checkpoint.resume import Resumed, load_newest
from hwrl.checkpoint.save import CapturedSave, Saver, not_saved
from hwrl.checkpoint.staging import CapturedState, SaveTuning, StagingMemory
from hwrl.comm import Group
from hwrl.discovery import backend_or_default
from hwrl.errors import CheckpointError, CheckpointSaveError, ConfigError, HwrlError
from hwrl.interfaces import Backend, OffloadedState

_log = logging.getLogger(__name__)

_RNG = "hwrl.rng"  # in rank_extra: the random-number generators, if the manager saved them by itself


@dataclass(frozen=True)
class SaveReport:
    """What one call of ``save`` cost the caller, on this rank.

    Seconds: ``waited_s`` is the wait for the previous save, and ``blocked_s`` is the rest of the call.

    Bytes: ``cloned_nbytes`` were copied within the device, and ``staged_nbytes`` were copied to the host. Both are 0
    for a save in the foreground. ``lent_nbytes`` is the size of the tensors in the offloader's copies, which are not
    copied again. ``held_nbytes`` is the page-locked host memory that the manager holds for this save and keeps for
    later ones.
    """

    waited_s: float
    blocked_s: float
    cloned_nbytes: int
    staged_nbytes: int
    lent_nbytes: int
    held_nbytes: int


class CheckpointManager:
    """Saves and resumes checkpoints in a directory. No other manager can save there while it is open.

    ``parts`` are the objects of the state by name, such as ``model=`` and ``optimizer=``: modules, optimizers, and
    others with ``state_dict`` and ``load_state_dict``. ``save`` and ``resume`` then need no ``state``, and also save
    and restore each rank's random-number generators, unless ``rank_extra`` has a ``rng``. A save changes nothing in the
    program, and calls only the objects' ``state_dict``: it takes no step to make an optimizer's state.

    Timeline: opening locks the directory and removes the drafts of dead writers. If another process holds the lock, it
    waits up to ``lock_wait_s`` seconds, and then raises CheckpointError. Then call ``save`` and ``resume`` in any
    order. ``close``, or the end of the ``with`` block, waits for a running save and releases the lock. If the program
    ends without ``close``, a running save is still completed, but its error does not change the exit status.

    ``max_ckpt_to_keep`` is how many checkpoints each node keeps, of those that are intact on its own disk; None keeps
    all. With ``async_save``, ``save`` copies the state, and a background thread writes the copy. The next call raises
    the thread's error. ``staging`` is where the copy is: "host" is page-locked memory, kept from one save to the next;
    "device" is device memory above the highest amount that the process has used so far, and the host for the rest.
    Every change of the disk goes through ``fs``, except to the lock file and to the files of ``export``.

    Several ranks: all ranks of ``group`` make the same calls in the same order. None is torch's default group. The
    ranks share one directory, or each host has one on its own disk (a node). They must begin each call within
    ``timeout_s`` of each other, and wait for each other without a limit after that. A rank that is late, or sends no
    heartbeat for ``timeout_s``, counts as lost, and the call fails on all ranks.

    ``docs/checkpoints.md`` has the protocol, the promises and the refusals.
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
        lock_wait_s: float = 1.0,
        fs: DurableFS | None = None,
        tuning: SaveTuning | None = None,
        **parts: Any,
    ) -> None:
        _check_options(max_ckpt_to_keep, staging, async_save=async_save)
        require_parts(parts)
        self._parts, self._process = parts, os.getpid()
        tuning = tuning or SaveTuning()
        fs = fs or DurableFS()
        self.directory = Path(directory).absolute()
        self._async_save, self._closed, self._calls = async_save, False, 0
        self._backend = backend = backend_or_default(backend)
        self._staging = StagingMemory(backend, tuning, on_device=staging == "device")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hwrl-checkpoint")
        self._background_save: Future[None] | None = None
        self._agreement = agreement_of(group, backend, timeout_s)
        self._shared = open_shared(self.directory, fs, self._agreement, look_s=tuning.look_s, lock_wait_s=lock_wait_s)
        self._saver = Saver(self._shared, keep=max_ckpt_to_keep, tuning=tuning)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        weight_version: int = 0,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Mapping[str, Any] | None = None,
        export: Callable[[Path, SavedTensors], object] | None = None,
        after_commit: Callable[[CheckpointInfo], object] | None = None,
        offloader: OffloadedState | None = None,
    ) -> SaveReport:
        """Save the parts, or ``state``, as ``step``, which must be later than every complete step.

        Without ``async_save``, the checkpoint is complete and durable when this returns. With it, this waits for the
        previous save and captures the state. Then the caller may change the contents of the state, but until the save
        has ended, not the shape of a tensor or the ``pieces`` of a :class:`LocalShards`.

        ``extra`` and ``rank_extra`` are JSON with string keys: rank 0's ``extra`` is saved, and each rank's
        ``rank_extra``. ``export`` writes files for other programs into the draft, and ``after_commit`` learns of the
        complete checkpoint before older ones are removed. Both are called once, on rank 0, in the background with
        ``async_save``; they never call the manager or a collective. ``offloader`` holds tensors of the state on the
        host: they are written from there. Call this inside ``offloader.lending()`` then.

        Raises :class:`~hwrl.errors.CheckpointSaveError` if this save fails, or if the previous one failed in the
        background. A rank that cannot capture its state may raise another :class:`~hwrl.errors.HwrlError`. Until the
        step is complete on all nodes, no complete checkpoint is removed. Go on with a later step. With ``async_save``,
        the next call raises what this one cannot know. If the previous save failed on all ranks and none has raised its
        error yet, this call raises it and saves nothing; otherwise it starts the save of ``step`` and then raises.
        """
        what = f"step {step} cannot be saved"
        call = self._begin_call(what, CheckpointSaveError)
        started_s = time.perf_counter()
        previous_error = self._previous_error()
        if previous_error is not None and self._agreement.size == 1:
            raise previous_error
        waited_until_s = time.perf_counter()
        try:
            taken = take_state(self._one_state(state, what, CheckpointSaveError))
            takes_rng = self._parts and "rng" not in (rank_extra or {})
            own_rng = {_RNG: rng_state(self._backend)} if takes_rng else {}
            captured = CapturedSave(
                call=call,
                step=_count("step", step),
                weight_version=_count("weight_version", weight_version),
                extra=copy_extra(extra),
                rank_extra=copy_extra({**own_rng, **(rank_extra or {})}),
                export=export,
                after_commit=after_commit,
                has_pending_error=previous_error is not None,
                state=CapturedState(taken, self._staging, copy=self._async_save, offloader=offloader),
            )
        except BaseException as exc:  # noqa: BLE001 - _refuse raises it again
            self._refuse(call, step, exc, previous_error)
        if self._async_save:
            self._save_in_background(captured)
        else:
            self._saver.save(captured)
        if previous_error is not None:
            raise previous_error
        return SaveReport(
            waited_s=waited_until_s - started_s,
            blocked_s=time.perf_counter() - waited_until_s,
            cloned_nbytes=captured.state.cloned_nbytes,
            staged_nbytes=captured.state.staged_nbytes,
            lent_nbytes=captured.state.lent_nbytes,
            held_nbytes=self._staging.nbytes,
        )

    def _refuse(self, call: int, step: int, exc: BaseException, previous_error: BaseException | None) -> NoReturn:
        """Raise ``exc``, also on the other ranks: they wait for this one."""
        error = not_saved(step, exc) if isinstance(exc, Exception) and not isinstance(exc, HwrlError) else exc
        if previous_error is not None:  # no later call raises it
            error.add_note(f"The previous save failed, too: {previous_error}")
        self._agreement.begin_call(call)
        with contextlib.suppress(Exception):
            self._agreement.refuse(error)
        raise error from (exc if error is not exc else exc.__cause__)

    def _save_in_background(self, captured: CapturedSave) -> None:
        try:
            self._background_save = self._thread.submit(self._saver.save, captured)
            self._background_save.add_done_callback(_log_failure)
        except BaseException:  # an interrupt, perhaps after the thread began the save; or the interpreter is exiting
            with contextlib.suppress(RuntimeError):
                self._thread.submit(int).result()  # wait until the thread has finished the save, if it has begun it
            captured.state.close()
            raise

    def _previous_error(self) -> BaseException | None:
        """Wait for the save in the background. Return its error once, or None."""
        self._require_own_process("no save can be waited for")
        if self._background_save is None:
            return None
        error = self._background_save.exception()
        self._background_save = None
        return error

    def _begin_call(self, what: str, error: type[CheckpointError]) -> int:
        """Count this call and return its number.

        The number is the same on all ranks, because all make the same calls. A call that fails is counted, too.
        """
        self._require_own_process(what, error)
        if self._closed:
            raise error(what, why="the manager is closed", fix="open a new manager")
        self._calls += 1
        return self._calls

    def _one_state(self, state: Any, what: str, error: type[CheckpointError]) -> dict[str, Any]:
        """Return ``state`` or, if it is None, the parts."""
        if bool(self._parts) is (state is not None):
            raise error(
                what,
                why="the call has a state, and the manager has parts" if self._parts else "there is no state",
                fix="give the objects to the manager (model=, optimizer=, ...), or a state to each call, not both",
            )
        chosen: dict[str, Any] = self._parts if state is None else state
        return chosen

    def _require_own_process(self, what: str, error: type[CheckpointError] = CheckpointSaveError) -> None:
        if os.getpid() != self._process:
            raise error(
                what,
                why=f"process {self._process} opened the manager, and this is its forked child {os.getpid()}: the "
                "threads that save and the directory's lock are in the parent",
                fix="save and resume in the process that opened the manager, or open one in the child when the parent "
                "has closed its own",
            )

    @property
    def is_saving(self) -> bool:
        """Whether a save is running in the background. It runs until its ``after_commit`` and retention are done."""
        self._require_own_process("it is not known whether a save is running")
        return self._background_save is not None and not self._background_save.done()

    def wait(self) -> None:
        """Block until no save is running. If the last save failed, raise its error once.

        After an interrupt, for example KeyboardInterrupt, it may be called again.
        """
        if (error := self._previous_error()) is not None:
            raise error

    def close(self) -> None:
        """Wait for a running save, and release the directory. If the save failed, raise its error.

        May be called more than once.
        """
        self._require_own_process("the manager cannot be closed")
        try:
            self.wait()
        finally:
            self._closed = True
            self._thread.shutdown()
            self._agreement.close()
            self._staging.close()
            self._shared.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            self.close()
        except CheckpointSaveError:
            if kind is None:
                raise
            _log.exception("closing the manager failed, too")  # only logged: the error of the block matters more

    # -- finding and loading ------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints that are intact on this disk, oldest first.

        File sizes are checked; hashes are not. Other nodes may lack their parts.
        """
        return find_checkpoints(self.directory)[0]

    def resume(self, state: dict[str, Any] | None = None, *, step: int | None = None) -> Resumed | None:
        """Load a checkpoint: the newest that can be resumed or, with ``step``, exactly this step.

        Returns None if there is no checkpoint, or if there are only steps that some node has not committed and that no
        tracker names. Then nothing has changed.

        Without ``state`` the manager's parts are restored, and the random-number generators if the manager saved them.
        A ``state`` has the structure of the saved state. Its tensors are overwritten in place, its plain values are
        replaced, and objects in it are restored. The state may be sharded over another number of ranks if each rank
        finds all its chunks on its own disk; otherwise join the parts of the nodes first.

        The hash of every file is verified before anything is loaded, and no code in a pickle is executed. A checkpoint
        that is damaged or incomplete is skipped, logged, and listed in ``skipped``. If a file is missing or has a wrong
        size, or if the manifest is invalid, the directory keeps its name until its step is saved again, because it may
        belong to another program. Otherwise, if a hash is wrong or a file cannot be read, the next ``save`` of this
        manager renames the checkpoint to ``.broken_…`` on all nodes, so that its step can be saved again. No file is
        deleted.

        Raises :class:`~hwrl.errors.CheckpointNotFoundError` if there are checkpoints but none can be resumed, so
        training never starts afresh silently. Raises :class:`~hwrl.errors.CheckpointError` if the checkpoint does not
        fit ``state``, if a rank is lost, or if the disk cannot be read. Raises
        :class:`~hwrl.errors.CheckpointCorruptError` if ``step`` is damaged, or if the files match their hashes and
        still cannot be read. Raises :class:`~hwrl.errors.DeviceMemoryError` if the device is full. After the
        verification no older step is tried. Once the ranks have begun to load, an error may leave ``state`` partly
        overwritten.
        """
        call = self._begin_call("nothing can be loaded", CheckpointError)
        previous_error = self._previous_error()
        self._agreement.begin_call(call)
        with self._agreement.round() as ranks:
            if previous_error is not None:
                raise previous_error
            into = self._one_state(state, "nothing can be loaded", CheckpointError)
            inventory = self._shared.inventory(ranks)
        resumed = load_newest(self._shared, inventory, into, step=step, backend=self._backend)
        if resumed is not None and state is None:
            of_ranks = resumed.rank_extras  # there may be fewer saved ranks than ranks now
            own = of_ranks[self._agreement.rank % len(of_ranks)]
            if _RNG in own:
                set_rng_state(own[_RNG], self._backend)
        return resumed


def _check_options(max_ckpt_to_keep: int | None, staging: str, *, async_save: bool) -> None:
    if max_ckpt_to_keep is not None and max_ckpt_to_keep < 1:
        raise ConfigError(
            f"max_ckpt_to_keep={max_ckpt_to_keep} is not allowed",
            why="the newest checkpoint is never removed",
            fix="give 1 or more, or None (in YAML, null) to keep all",
        )
    if staging not in ("host", "device"):
        raise ConfigError(
            f"staging={staging!r} is not allowed",
            why="a state can be staged on the host or on the device",
            fix='give "host" or "device"',
        )
    if staging == "device" and not async_save:
        raise ConfigError(
            'staging="device" is not allowed without async_save',
            why="a save in the foreground does not copy the state",
            fix='also give async_save=True, or give staging="host"',
        )


def _log_failure(saving: Future[None]) -> None:
    """Log the error of a save at once. The next call raises it, but the program may end without another call."""
    error = saving.exception()
    if error is not None:
        _log.error("a save in the background failed: %s", error)


def _count(name: str, value: Any) -> int:
    """Return ``value`` as an int. Raise CheckpointSaveError if it is not an integer from 0 on."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (count := operator.index(value)) >= 0:
            return count
    raise CheckpointSaveError(
        f"{name}={value!r} cannot be saved", why="it is not an integer, or it is negative", fix="give an integer >= 0"
    )
