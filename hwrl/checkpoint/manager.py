""":class:`CheckpointManager`: saves a training state so that a crash at any point leaves a complete one to resume."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # gives the names that the planner uses

from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory, usable
from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.format.layout import LayoutReader, StateLoad, distinct_names, require_all_wanted
from hwrl.checkpoint.format.manifest import (
    CheckpointInfo,
    Skipped,
    corrupt,
    find_checkpoints,
    inspect_checkpoint,
    read_extra,
    step_name,
    verify_files,
)
from hwrl.checkpoint.saving.agreement import Agreement
from hwrl.checkpoint.saving.inventory import Survey, look, merge
from hwrl.checkpoint.saving.nodes import join_node
from hwrl.checkpoint.saving.save import SaveJob, Saver
from hwrl.checkpoint.saving.staging import Staging
from hwrl.checkpoint.saving.state import SaveSource, require_memory
from hwrl.checkpoint.saving.tensor_files import MAX_FILES
from hwrl.comm import Group, PrefixStore
from hwrl.discovery import backend_or_default
from hwrl.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    ConfigError,
)
from hwrl.interfaces import Backend, OffloadedState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """What a call of ``save`` cost the caller: seconds waited for the previous save, seconds until it returned
    after that, bytes copied within the device and to the host (both 0 when the save ran in the foreground), bytes that
    are read from an offloader's copies instead, and the bytes of host memory that the manager keeps for this save and
    later ones."""

    waited_s: float
    blocked_s: float
    cloned_nbytes: int
    staged_nbytes: int
    lent_nbytes: int
    held_nbytes: int


@dataclass(frozen=True)
class Resumed:
    """What was loaded: the checkpoint, its ``extra``, each rank's ``rank_extras`` at the time of the save (by rank,
    as many as ranks saved), and what was passed over on the way to it."""

    info: CheckpointInfo
    extra: dict[str, Any]
    rank_extras: list[dict[str, Any]]
    skipped: list[Skipped]

    @property
    def step(self) -> int:
        """The step that was loaded."""
        return self.info.step


class CheckpointManager:
    """The one writer of a directory of checkpoints.

    ``max_ckpt_to_keep`` newest checkpoints stay, None keeps all. With ``async_save`` the state is copied, and the copy
    written by a background thread; what that thread could not do is raised by the next call. ``staging`` is where that
    copy lies: "host", page-locked memory that is kept; or "device", memory there that nothing else needed so far and
    that is freed while the copy is written. What has no room on the device is staged on the host. ``group`` holds the
    ranks that save together; they make the same calls in the same order, and share one directory, or have one for each
    node on its own disk. A rank that has not been heard of for ``timeout_s`` counts as lost; one that is heard of may
    take its time to write. ``fs`` is the door to the disk.

    Timeline: opening takes the directory's lock and sweeps what dead writers left; ``resume`` comes first, then any
    number of ``save``; ``close``, or leaving the context, waits for a save that runs and releases the lock.
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
    ) -> None:
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
                why="what is saved in the foreground is not staged",
                fix='give async_save=True, too, or staging="host"',
            )
        self.directory = Path(directory).absolute()
        self._async_save, self._closed, self._calls = async_save, False, 0
        self._staging = Staging(backend_or_default(backend), on_device=staging == "device", readers=MAX_FILES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hwrl-checkpoint")
        self._pending: Future[None] | None = None
        self._agreement = _agreement(group, timeout_s)
        self._fs = fs or DurableFS()
        self._node = join_node(self.directory, self._fs, self._agreement)
        try:
            self._agreement.vote(self._open_home)
            newest = self._survey().newest
            self._agreement.vote(lambda: self._set_tracker(newest))
        except Exception:
            self._close_home()
            raise
        self._saver = Saver(self.directory, self._agreement, self._node, self._fs, max_ckpt_to_keep)

    def _open_home(self) -> None:
        if self._node.agreement.decides:
            self._node.home = CheckpointDirectory(self.directory, self._fs)

    def _set_tracker(self, newest: int) -> None:
        """Let the tracker name the newest complete checkpoint, if its writer did not come to it.

        A tracker that names what is not complete makes its reader fail; without one, he would silently begin afresh.
        """
        if self._node.home is not None and newest >= 0:
            with usable(self.directory):
                self._node.home.set_tracker(newest)

    def _survey(self) -> Survey:
        home = self._node.home
        found = self._agreement.decide(
            lambda: None if home is None else look(home),
            lambda views: asdict(merge([view for view in views if view is not None])),
        )
        return Survey(**found)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        weight_version: int = 0,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Mapping[str, Any] | None = None,
        export: Callable[[Path], object] | None = None,
        offloader: OffloadedState | None = None,
    ) -> SaveReport:
        """Save ``state`` as ``step``, which must be later than every complete step in the directory.

        ``state`` is a nested dict of tensors, DTensors, :class:`LocalShards` and plain values, as ``get_state_dict`` of
        ``torch.distributed.checkpoint.state_dict`` returns it. ``extra`` is JSON with string keys, taken from rank 0;
        ``rank_extra`` likewise, kept for each rank. ``export`` is called once, on rank 0, with the path of an empty
        directory ``hf`` inside the checkpoint, to write files for other readers; with ``async_save`` it runs in the
        background, so it must own what it reads and call no collective. What ``offloader`` holds on the host is written
        from there, neither loaded nor copied; take the state inside ``offloader.lending()`` then. The offloader may be
        used at once: an ``offload`` that would overwrite what is not written yet waits for it, and for all of it until
        every rank has begun to save.

        Without ``async_save`` the checkpoint is complete and durable when this returns. With it, the caller may change
        the state as soon as this returns; the call waits for a previous save that is still running. Raises
        :class:`~hwrl.errors.CheckpointSaveError` if this save, or the previous one in the background, failed; then
        the checkpoints before it are untouched and the next save may succeed. A call that raises the previous failure
        saves nothing, unless another rank was told before and goes on.
        """
        call = self._count_call(f"step {step} cannot be saved", CheckpointSaveError)
        started_s = time.perf_counter()
        failed = self._previous_failure()
        if failed is not None and len(self._agreement.ranks) == 1:
            raise failed
        waited_s = time.perf_counter()
        with self._telling(call, step):
            counts = _count("step", step), _count("weight_version", weight_version)
            items = SaveSource(state, offloader=offloader)
            job = SaveJob(call, *counts, items, _json(extra), _json(rank_extra), export, goes_on=failed is None)
            self._hold(items)
        self._start(job)
        if failed is not None:
            raise failed
        return SaveReport(
            waited_s=waited_s - started_s,
            blocked_s=time.perf_counter() - waited_s,
            cloned_nbytes=items.cloned_nbytes,
            staged_nbytes=items.staged_nbytes,
            lent_nbytes=items.lent_nbytes,
            held_nbytes=self._staging.nbytes,
        )

    @contextlib.contextmanager
    def _telling(self, call: int, step: int) -> Iterator[None]:
        """Tell the other ranks, which wait for this one, of whatever the block raises."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - whatever it is
            self._saver.refuse(call, step, exc)
        except BaseException as exc:
            with contextlib.suppress(Exception):
                self._saver.refuse(call, step, RuntimeError(f"interrupted by {exc!r}"))
            raise

    def _previous_failure(self) -> Exception | None:
        """Wait; return what the save that ran failed with."""
        try:
            self.wait()
        except Exception as exc:  # noqa: BLE001 - raised by the caller
            return exc
        return None

    def _count_call(self, what: str, error: type[CheckpointError]) -> int:
        """Return the number of this call, which all ranks make, however it ends on each."""
        if self._closed:
            raise error(what, why="the manager is closed", fix="open another")
        self._calls += 1
        return self._calls

    def _hold(self, items: SaveSource) -> None:
        try:
            items.hold(self._staging, copy=self._async_save)
        except BaseException:
            items.close()
            raise

    def _start(self, job: SaveJob) -> None:
        if not self._async_save:
            self._saver.run(job)
            return
        try:
            self._pending = self._thread.submit(self._saver.run, job)
            self._pending.add_done_callback(_log_failure)
        except BaseException:  # an interrupt, and the thread may have the job; or it takes none
            with contextlib.suppress(RuntimeError):
                self._thread.submit(int).result()
            job.source.close()
            raise

    def wait(self) -> None:
        """Block until no save is running; raise what it failed with. Interrupted, it may be called again."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for a running save, raise what it failed with, and release the directory. May be called again."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._thread.shutdown()
            self._staging.close()
            self._close_home()

    def _close_home(self) -> None:
        home, self._node.home = self._node.home, None
        if home is not None:
            home.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            self.close()
        except CheckpointSaveError:
            if kind is None:
                raise
            _log.exception("the last save failed too")  # what ended the block is raised, and says more

    # -- finding and loading ------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the complete checkpoints, oldest first. Sizes are checked, hashes are not."""
        return find_checkpoints(self.directory)[0]

    def resume(self, state: dict[str, Any], *, step: int | None = None) -> Resumed | None:
        """Load the newest checkpoint that is whole, or exactly ``step``, into ``state``; None if there is none at all.

        ``state`` has the structure that was saved: its tensors are overwritten in place, other values replaced. It may
        be sharded over another number of ranks. Every file's hash is verified before anything is loaded; a
        checkpoint that fails is passed over, logged and reported in ``skipped``; the next ``save`` renames it to
        ``.broken_…``, so that its step can be saved again and nothing is lost. No pickle is executed.

        Raises :class:`~hwrl.errors.CheckpointNotFoundError` if there are checkpoints but none is whole (training
        never starts afresh silently), :class:`~hwrl.errors.CheckpointError` if the checkpoint does not fit ``state``,
        :class:`~hwrl.errors.CheckpointCorruptError` if ``step`` is not whole, or if files that match their hashes
        cannot be read all the same; ``state`` may be partly overwritten in that last case only.
        """
        call = self._count_call("nothing can be loaded", CheckpointError)
        self.wait()
        self._agreement.begin(call)
        survey = self._survey()
        skipped = [Skipped(self.directory / name, reason) for name, reason in survey.skipped.items()]
        for one in skipped:
            _log.warning("skipping %s: %s", one.path, one.reason)
        candidates = survey.complete[::-1]
        if step is not None:
            candidates, skipped = [self._only(step, survey)], []
        for candidate in candidates:
            path = self.directory / step_name(candidate)
            reason = self._agreement.decide(functools.partial(self._verify_share, path), _first)
            if reason is None:
                return self._load(inspect_checkpoint(path), state, skipped)
            _log.warning("skipping %s: %s", path, reason)
            skipped.append(Skipped(path, reason))
            self._saver.broken.append(path)
        if not candidates and not survey.lost:
            return None
        if step is not None:
            raise corrupt(skipped[0].path, skipped[0].reason)
        raise CheckpointNotFoundError(
            f"no checkpoint in {self.directory} is whole",
            why="; ".join(f"{one.path.name}: {one.reason}" for one in skipped),
            fix="restore one of them from a copy, or start in an empty directory",
        )

    def _only(self, step: int, survey: Survey) -> int:
        if step in survey.complete:
            return step
        if (name := step_name(step)) in survey.skipped:
            raise corrupt(self.directory / name, survey.skipped[name])
        raise CheckpointNotFoundError(
            f"there is no checkpoint of step {step} in {self.directory}",
            why=f"it holds steps {survey.complete}",
            fix="choose one of these, or give no step for the newest",
        )

    def _verify_share(self, path: Path) -> str | None:
        """Verify this rank's share of the files that its node has; return why they cannot be trusted, if so."""
        try:
            info = inspect_checkpoint(path)
            names = sorted(info.manifest.files)
            verify_files(info, names[self._node.rank :: len(self._node.agreement.ranks)])
        except CheckpointCorruptError as exc:
            return exc.why
        return None

    def _load(self, info: CheckpointInfo, state: dict[str, Any], skipped: list[Skipped]) -> Resumed:
        self._fill(state, info)
        return Resumed(info, *read_extra(info), skipped)

    def _fill(self, state: dict[str, Any], info: CheckpointInfo) -> None:
        reader = LayoutReader(info)
        load = StateLoad(info, reader)

        def plan() -> tuple[int, list[str]]:
            with distinct_names(CheckpointError):
                require_memory(flatten_state_dict(state)[0])
            return self._node.number, load.plan(state, reader.read_metadata())

        with torch.device("cpu"):  # what torch's reader makes is not for the caller's default device
            self._agreement.decide(plan, require_all_wanted)
            self._agreement.vote(load.run)


def _agreement(group: Group | None, timeout_s: float) -> Agreement:
    if not isinstance(group, Group | None):
        raise ConfigError(
            f"group={group!r} is not possible",
            why="ranks agree over the store of an hwrl.comm.Group",
            fix="give hwrl.comm.Comm().default_group(), or .new_group(ranks) for some of its ranks",
        )
    if group is None:
        return Agreement(None, rank=0, ranks=[0], timeout_s=timeout_s)
    opened = group.store.add(
        f"hwrl/checkpoint/opened/{group.rank}", 1
    )  # all ranks open their managers in the same order
    store = PrefixStore(f"hwrl/checkpoint/{opened}", group.store)
    return Agreement(store, rank=group.rank, ranks=range(group.size), timeout_s=timeout_s)


def _log_failure(saving: Future[None]) -> None:
    """Say now what the next call raises: there may be none before the program ends."""
    error = saving.exception()
    if error is not None:
        _log.error("a save in the background failed: %s", error)


def _count(name: str, value: Any) -> int:
    """Return ``value`` as the integer that a manifest can hold."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (count := operator.index(value)) >= 0:
            return count
    raise CheckpointSaveError(
        f"{name}={value!r} cannot be saved", why="it is no integer, or less than 0", fix="count from 0, in integers"
    )


def _json(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of ``value``, so that the caller may go on changing it; refuse what JSON would alter."""
    value = dict(value or {})
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as exc:
        raise _not_json(str(exc)) from exc
    _refuse_altered(value)
    return copy


def _refuse_altered(value: object) -> None:
    if isinstance(value, tuple):
        raise _not_json(f"the tuple {value!r} would come back as a list")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _not_json(f"the key {key!r} is no string and would come back as one")
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _refuse_altered(one)


def _not_json(why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        "the extra state cannot be saved",
        why=why,
        fix="give JSON with string keys, and lists for tuples; put tensors into the state",
    )


def _first(answers: list[str | None]) -> str | None:
    return next((answer for answer in answers if answer is not None), None)
