"""The save of one step, from the captured state to the commit and retention: :class:`Saver`."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import hwrl
from hwrl.checkpoint.agreement import Round
from hwrl.checkpoint.directory import draft_path
from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.layout import Json, seal
from hwrl.checkpoint.load import SavedTensors
from hwrl.checkpoint.manifest import CheckpointInfo, Manifest, step_name, step_of
from hwrl.checkpoint.nodes import SharedDirectory, merge_looks
from hwrl.checkpoint.shards import SaveItem, assign
from hwrl.checkpoint.staging import CapturedState, SaveTuning
from hwrl.errors import CheckpointSaveError, HwrlError
from hwrl.files import LOST

EXPORT_NAME = "hf"
"""The directory in a checkpoint for the files of ``export``."""
Export = Callable[[Path, SavedTensors], object]
"""The caller's function that writes files for other readers: it gets an empty directory and the saved tensors."""
AfterCommit = Callable[[CheckpointInfo], object]
"""The caller's function that runs when the checkpoint is complete."""

_SMALL_NBYTES = 64 << 10
"""An item below this is written at once. torch.save makes some 20 writes for each tensor."""

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class CapturedSave:
    """The arguments of ``save``, with the captured state. ``call`` is the number of the call, the same on all ranks.

    ``has_pending_error`` says that this call of ``save`` will raise the error of the previous save. If that is so on
    every rank, nothing is saved. If another rank has no pending error, it had none, or it raised it in an earlier call.
    Then all ranks save this step in the background, and on this rank ``save`` raises the pending error at once.
    """

    call: int
    step: int
    weight_version: int
    state: CapturedState
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    export: Export | None
    after_commit: AfterCommit | None
    has_pending_error: bool


class _AgreedSave(NamedTuple):
    """What the ranks have agreed on. This rank writes ``items``. ``extra`` is None except on node leaders.

    ``newest`` is the newest complete step. ``uncommitted`` has the intact checkpoints on this disk that are newer.
    """

    save_id: str
    draft: Path
    newest: int
    uncommitted: list[Path]
    items: list[SaveItem]
    extra: Json | None


class Saver:
    """Saves steps, one at a time. All ranks do it together, in four rounds of their agreement.

    The assignment is who writes what. It is kept for as long as no rank's items change: then a rank sends no items, and
    rank 0 assigns none. A rank forgets the assignment before a first round, and knows it again when it has read the
    decision of rank 0. So a rank that knows an assignment, knows the one of rank 0.
    """

    def __init__(self, shared: SharedDirectory, *, keep: int | None, tuning: SaveTuning) -> None:
        self._shared, self._keep, self._tuning = shared, keep, tuning
        self._assigned: tuple[list[SaveItem], list[int]] | None = None  # this rank's items, and positions of its own
        self._packed_entries = [b""] * shared.agreement.size  # on rank 0: those of each rank's items, compressed

    def save(self, captured: CapturedSave) -> None:
        """Write and commit ``captured``, and release its state.

        When this returns, the checkpoint is durable, the tracker names it, and retention has removed old checkpoints.
        But if every rank has a pending error, nothing is saved. Raises CheckpointSaveError on all ranks if one rank
        fails.
        """
        self._shared.agreement.begin_call(captured.call)
        try:
            agreed = self._agree(captured)
            if agreed is not None:
                self._save_agreed(captured, agreed)
        except CheckpointSaveError:
            raise
        except Exception as exc:  # from the disk, from another rank, or from the caller's export
            raise not_saved(captured.step, exc) from exc
        finally:
            captured.state.close()

    def _save_agreed(self, captured: CapturedSave, agreed: _AgreedSave) -> None:
        """Write, commit, and finish: each is a round. So no rank begins one before all have succeeded in the last.

        If a rank cannot read the decision of the first round, its error says that the step was not saved, although the
        others may go on.
        """
        agreement, step = self._shared.agreement, captured.step
        try:
            with agreement.round() as ranks:
                manifest = self._write(ranks, captured, agreed)
        except Exception:
            self._remove_draft(agreed.draft)
            raise
        try:
            with agreement.round():
                self._commit(agreed.draft, step)
            with agreement.round() as ranks:
                self._finish(ranks, captured, manifest)
        except CheckpointSaveError:
            self._remove_draft(agreed.draft)
            raise
        except Exception as exc:  # a rank fell silent or the store failed, so others may have gone on
            may_be_complete = not self._remove_draft(agreed.draft)  # while this draft exists, the step is incomplete
            raise not_saved(step, exc, may_be_complete=may_be_complete) from exc

    # -- round 1: agree -----------------------------------------------------------------------------------------

    def _agree(self, captured: CapturedSave) -> _AgreedSave | None:
        """Agree with all ranks on this save. Return None if every rank has a pending error: nothing is saved then."""
        shared, known, self._assigned = self._shared, self._assigned, None
        rank, leads = shared.agreement.rank, shared.own is not None
        with shared.agreement.round() as ranks:
            items = captured.state.list_items(max_nbytes=self._tuning.max_item_nbytes)
            is_known = known is not None and known[0] == items
            request = {
                "step": captured.step,
                "has_pending_error": captured.has_pending_error,
                "rank_extra": captured.rank_extra,
                "entries": None if is_known else [item.entry for item in items],
                "look": (look := shared.look(without=shared.damaged)),
            }
            requests, decision, extra = ranks.gather(request), None, None
            if requests is not None:
                decision = self._decide(captured.step, requests)
                extra = {"all": captured.extra, "ranks": [request["rank_extra"] for request in requests]}
                if len(shared.nodes) > 1:
                    ranks.tell(extra)  # it may be too large to send it to every rank
            elif leads:
                [extra] = ranks.hear([0])
            decision = ranks.broadcast(decision)
        if decision["save_id"] is None:
            self._assigned = known
            return None
        positions = decision["positions"]
        positions_here = known[1] if known and positions is None else positions[rank]
        self._assigned = items, positions_here
        own = [items[position] for position in positions_here]
        if captured.state.offloaded:
            own.sort(key=lambda item: item.key not in captured.state.offloaded)  # the next offload waits for these
        draft = draft_path(shared.path, captured.step, decision["save_id"])
        intact = [] if look is None else look["intact"]
        uncommitted = [shared.path / name for name in intact if (step_of(name) or 0) > decision["newest"]]
        return _AgreedSave(decision["save_id"], draft, decision["newest"], uncommitted, own, extra)

    def _decide(self, step: int, requests: Sequence[Json]) -> Json:
        """On rank 0, check the requests of all ranks and decide what they save, and who writes what."""
        shared = self._shared
        newest = merge_looks([request["look"] for request in requests]).newest
        decision: Json = {"save_id": None, "newest": newest, "positions": None}
        if all(request["has_pending_error"] for request in requests):
            return decision
        if len({request["step"] for request in requests}) > 1:
            steps = [request["step"] for request in requests]
            raise not_saved(step, f"the ranks called save with different steps: {steps}")
        if step <= newest:
            raise CheckpointSaveError(
                f"step {step} cannot be saved",
                why=f"{shared.path} already has the complete step {newest}",
                fix="save a later step; to go back to an earlier one, first move the newer checkpoints away",
            )
        changed = {rank: request["entries"] for rank, request in enumerate(requests) if request["entries"] is not None}
        if changed:
            for rank, entries in changed.items():
                self._packed_entries[rank] = zlib.compress(json.dumps(entries).encode(), 1)
            positions: dict[int, list[int]] = {}
            packed = self._packed_entries
            for ranks in shared.nodes:  # an item on two nodes is written on both
                entries_here = [changed.get(rank) or json.loads(zlib.decompress(packed[rank])) for rank in ranks]
                positions |= zip(ranks, assign(entries_here), strict=True)
            decision["positions"] = [positions[rank] for rank in range(len(requests))]
        return {**decision, "save_id": os.urandom(8).hex()}

    # -- round 2: write -----------------------------------------------------------------------------------------

    def _write(self, ranks: Round, captured: CapturedSave, agreed: _AgreedSave) -> Manifest | None:
        """Write all files of this node. The state is released as soon as this rank's items are written.

        Returns the manifest on node leaders, when every file of the node is durable in the draft.
        """
        shared, state = self._shared, captured.state
        if shared.own is None:
            ranks.hear(shared.ranks[:1])
        else:
            self._prepare_draft(captured, agreed)
            ranks.tell(None)
        state.read_only(agreed.items)
        try:
            entries = write_tensor_files(shared, agreed.draft, agreed.items, state, self._tuning)
        finally:
            state.close()
        files = shared.fs.take_records(agreed.draft)
        if shared.own is None:
            ranks.tell([entries, {name: vars(record) for name, record in files.items()}])
            return None
        for others_entries, others_files in ranks.hear(shared.ranks[1:]):
            entries += others_entries
            files |= {name: FileRecord(**record) for name, record in others_files.items()}
        return self._seal(captured, agreed, entries, files)

    def _prepare_draft(self, captured: CapturedSave, agreed: _AgreedSave) -> None:
        """Correct the tracker, put aside checkpoints that cannot be resumed, and create the draft."""
        own, damaged = self._shared.own, self._shared.damaged
        assert own is not None, "a node leader has one"
        if agreed.newest >= 0:
            own.set_tracker(agreed.newest)
        own.put_aside(sorted({*damaged, *agreed.uncommitted}))
        damaged.clear()  # later checkpoints with these names will be intact
        own.create_draft(captured.step, agreed.save_id)

    def _seal(
        self, captured: CapturedSave, agreed: _AgreedSave, entries: list[Json], files: dict[str, FileRecord]
    ) -> Manifest:
        """On the node leader, add the export, layout, extra state and manifest to the files of the node's ranks."""
        shared = self._shared
        manifest = Manifest(
            step=captured.step,
            save_id=agreed.save_id,
            world_size=shared.agreement.size,
            weight_version=captured.weight_version,
            saved_unix_s=time.time(),
            versions={"hwrl": hwrl.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
            files=files,
            node=shared.node,
            nodes=len(shared.nodes),
        )
        if shared.agreement.rank == 0 and captured.export is not None:
            saved = SavedTensors(CheckpointInfo(agreed.draft, manifest), entries)
            _export(shared.fs, agreed.draft / EXPORT_NAME, captured.export, saved)
        assert agreed.extra is not None, "a node leader has it"
        return seal(shared.fs, agreed.draft, entries, agreed.extra, manifest)

    def _remove_draft(self, draft: Path) -> bool:
        """On the node leader, remove the draft if it still exists. Return whether it existed."""
        if self._shared.own is None or not draft.exists():
            return False
        self._shared.own.remove_draft(draft)
        return True

    # -- rounds 3 and 4: commit and finish ----------------------------------------------------------------------

    def _commit(self, draft: Path, step: int) -> None:
        """On the node leader, give the draft its final name. When all nodes have done so, the step is complete."""
        if self._shared.own is None:
            return
        try:
            self._shared.own.commit(draft, step)
        except OSError as exc:
            if exc.errno == LOST or draft.exists():
                raise not_saved(step, exc) from exc
            raise CheckpointSaveError(
                f"step {step} is complete on this disk, but its name may not be durable",
                why=f"{exc.strerror}: {exc.filename}",
                fix="fix the cause and save a later step; with several nodes, this step is complete if all nodes "
                "have it",
            ) from exc

    def _finish(self, ranks: Round, captured: CapturedSave, manifest: Manifest | None) -> None:
        """On the node leader, set the tracker and remove all but the newest ``keep`` checkpoints.

        Rank 0 calls ``after_commit`` in between. Until it has returned, a tracker of the caller may name an old
        checkpoint. So no node removes one before that.
        """
        own, step = self._shared.own, captured.step
        if own is None:
            return
        with _complete_but(step, "the tracker was not set", fix="the next save sets it and removes old checkpoints"):
            own.set_tracker(step)
        if self._shared.agreement.rank:
            ranks.hear([0])
        else:
            if captured.after_commit is not None:
                assert manifest is not None, "rank 0 is the leader of its node"
                fix = "after_commit is not called again for this step, and the next save removes old checkpoints"
                with _complete_but(step, "its after_commit failed", fix=fix):
                    captured.after_commit(CheckpointInfo(self._shared.path / step_name(step), manifest))
            ranks.tell(None)
        with _complete_but(step, "old checkpoints were not removed", fix="the next save removes them"):
            own.retain(self._keep)


# -- files ----------------------------------------------------------------------------------------------------------


def _export(fs: DurableFS, directory: Path, export: Export, saved: SavedTensors) -> None:
    fs.mkdir(directory)
    export(directory, saved)
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            raise CheckpointSaveError(
                f"the export created a symbolic link: {path.name}",
                why="a checkpoint may contain only regular files",
                fix="write the content into a file",
            )
        if path.is_file():
            fs.adopt_file(path)


def write_tensor_files(
    shared: SharedDirectory, draft: Path, items: Sequence[SaveItem], state: CapturedState, tuning: SaveTuning
) -> list[Json]:
    """Write ``items`` into files ``__<rank>_<number>.distcp``, in parallel. Return their entries for the layout.

    The files have the names and the format of torch's writer; ``.metadata`` is written later. When this returns, the
    content of all files is durable. If files fail, this waits for all of them and raises the error of the first.
    """

    def write(number: int, file_items: list[SaveItem]) -> list[Json]:
        name, entries = f"__{shared.agreement.rank}_{number}.distcp", []
        with shared.fs.create_stream(draft / name) as stream:
            for item in file_items:
                start = stream.tell()
                with state.reading(item) as data:
                    if isinstance(data, io.BytesIO):
                        stream.write(data.getbuffer())
                    elif item.nbytes >= _SMALL_NBYTES:
                        torch.save(data, stream)
                    else:
                        torch.save(data, written := io.BytesIO())
                        stream.write(written.getbuffer())
                entries.append({**item.entry, "file": name, "start": start, "nbytes": stream.tell() - start})
        return entries

    files = enumerate(_divide_over_files(items, tuning))
    written = _run_in_threads([functools.partial(write, *numbered) for numbered in files])
    return [entry for entries in written for entry in entries]


def _divide_over_files(items: Sequence[SaveItem], tuning: SaveTuning) -> list[list[SaveItem]]:
    """Divide ``items`` into files of about equal size. Within a file, the items keep their order.

    The items are placed in descending order of size, each into the file that is the smallest so far.
    """
    count = max(1, min(tuning.max_files, sum([item.nbytes for item in items]) // tuning.min_file_nbytes))
    if count == 1:
        return [list(items)]
    positions: list[list[int]] = [[] for _ in range(count)]
    file_nbytes = [0] * count
    for position in sorted(range(len(items)), key=lambda position: -items[position].nbytes):
        smallest = file_nbytes.index(min(file_nbytes))
        positions[smallest].append(position)
        file_nbytes[smallest] += items[position].nbytes
    return [[items[position] for position in sorted(in_file)] for in_file in positions]


def _run_in_threads(actions: Sequence[Callable[[], _ResultT]]) -> list[_ResultT]:
    """Run each action in its own thread. (An executor cannot be used: it refuses work while the interpreter exits.)"""
    futures: list[Future[_ResultT]] = [Future() for _ in actions]

    def run(action: Callable[[], _ResultT], future: Future[_ResultT]) -> None:
        try:
            future.set_result(action())
        except BaseException as exc:  # noqa: BLE001 - raised again by future.result()
            future.set_exception(exc)

    for pair in zip(actions, futures, strict=True):
        threading.Thread(target=run, args=pair).start()
    try:
        wait(futures)  # not Thread.join: after an interrupt it can report a running thread as ended (bpo-45274)
    except BaseException:  # an interrupt: wait for the threads, because they read a state that the caller will change
        wait(futures)
        raise
    return [future.result() for future in futures]


# -- errors ---------------------------------------------------------------------------------------------------------


def _reason(exc: Exception) -> str:
    if not isinstance(exc, HwrlError):
        return f"{type(exc).__name__}: {exc}"
    return f"{exc.what}; {exc.why}" if exc.why else exc.what  # an error of another rank may have no `why`


def not_saved(step: int, why: str | Exception, *, may_be_complete: bool = False) -> CheckpointSaveError:
    """Return the error for a step that is not on the disk.

    With ``may_be_complete``, this rank lost contact during the commit or later. (Later, the step is complete.)
    """
    what, fix = "was not saved", "fix the cause and save again; resume loads the newest complete step"
    if may_be_complete:
        what, fix = "may or may not be complete", "save a later step; resume loads the newest complete step in any case"
    return CheckpointSaveError(f"step {step} {what}", why=_reason(why) if isinstance(why, Exception) else why, fix=fix)


@contextlib.contextmanager
def _complete_but(step: int, failure: str, *, fix: str) -> Iterator[None]:
    """Translate an error in the block, which comes after the commit on all nodes."""
    try:
        yield
    except Exception as exc:
        raise CheckpointSaveError(
            f"step {step} is complete, but {failure}", why=_reason(exc), fix=f"fix the cause; {fix}"
        ) from exc
