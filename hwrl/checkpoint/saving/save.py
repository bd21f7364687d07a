"""The protocol of a save, from the captured state to the commit: :class:`SaveProtocol`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans  # the first step of torch's planner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

import hwrl
from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory, draft_path
from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.format.layout import decode_plan, encode_items
from hwrl.checkpoint.format.loading import SavedTensors
from hwrl.checkpoint.format.manifest import CheckpointInfo, Manifest, step_name
from hwrl.checkpoint.format.seal import seal
from hwrl.checkpoint.saving.agreement import Agreement
from hwrl.checkpoint.saving.inventory import RankInventory, merge_inventories
from hwrl.checkpoint.saving.nodes import Node
from hwrl.checkpoint.saving.stages import (
    AgreedSave,
    Assignment,
    CapturedSave,
    CommittedSave,
    Export,
    ExtraState,
    PlannedSave,
    RankFiles,
    RankPlan,
    SaveOrder,
    SaveRequest,
    WrittenSave,
)
from hwrl.checkpoint.saving.state import StateReader, plan_items
from hwrl.checkpoint.saving.tensor_files import write_tensor_files
from hwrl.checkpoint.saving.tuning import SaveTuning
from hwrl.errors import CheckpointError, CheckpointSaveError, HwrlError

EXPORT_NAME = "hf"


@dataclass(frozen=True)
class SaveProtocol:
    """Saves one step at a time, on all ranks of ``agreement`` together.

    ``path`` holds the checkpoints. ``directory`` is there on the first rank of each node: this rank creates, renames
    and removes the entries of ``path``.

    ``failed_verification`` are checkpoints with wrong content. This list is shared with :class:`ResumeProtocol`, which
    fills it on every rank. The first rank of each node puts them aside in its next save, and empties its list.
    """

    path: Path
    agreement: Agreement
    node: Node
    directory: CheckpointDirectory | None
    fs: DurableFS
    keep: int | None
    tuning: SaveTuning
    failed_verification: list[Path]

    def save(self, captured: CapturedSave) -> None:
        """Write and commit ``captured``, and release its state.

        When this returns, the checkpoint is durable, the tracker names it, and older ones are removed, unless every
        rank is about to raise its previous failure; then nothing is saved. Raises CheckpointSaveError on all ranks if
        any rank fails.
        """
        self.agreement.begin_call(captured.call)
        try:
            agreed = self._agree(captured)
            if agreed is not None:
                self._save_agreed(agreed)
        except CheckpointSaveError:
            raise
        except Exception as exc:  # from the disk, from another rank, or from the caller's export
            raise _not_saved(captured.step, _reason(exc)) from exc
        finally:
            captured.state.close()

    def refuse(self, call: int, step: int, error: Exception) -> NoReturn:
        """Replace :meth:`save` on a rank that could not capture its state: raise ``error`` on all ranks."""
        self.agreement.begin_call(call)
        with self.agreement.vote():
            if isinstance(error, HwrlError):
                raise error
            raise _not_saved(step, _reason(error)) from error
        raise AssertionError("the vote has failed")

    def _save_agreed(self, agreed: AgreedSave) -> None:
        """Write, commit, announce, and remove old checkpoints. Each is a vote: all ranks have done the one before."""
        step = agreed.captured.step
        try:
            with self.agreement.vote():
                planned = self._plan(agreed)
                written = self._write(planned)
        except Exception:
            self._remove_draft(agreed.draft)
            raise
        try:
            with self.agreement.vote():
                committed = self._commit(written)
            with self.agreement.vote():
                self._announce(committed)
            with self.agreement.vote():
                self._retain(step)
        except CheckpointSaveError:
            self._remove_draft(agreed.draft)
            raise
        except Exception as exc:  # a rank is silent, or was; the step may be complete unless this rank has its draft
            may_be_complete = not self._remove_draft(agreed.draft)
            raise (_in_doubt if may_be_complete else _not_saved)(step, _reason(exc)) from exc

    # -- captured -> agreed -------------------------------------------------------------------------------------

    def _agree(self, captured: CapturedSave) -> AgreedSave | None:
        """Have all ranks begin the same save; None if every rank raises its previous failure."""
        with self.agreement.round() as ranks:
            own = RankInventory.read(self.directory, without=self.failed_verification)
            request = SaveRequest(
                captured.step,
                captured.previous_save_succeeded,
                captured.extra,
                captured.rank_extra,
                inventory=own.node,
            )
            requests = ranks.gather(request)
            order = ranks.broadcast(None if requests is None else self._order(captured.step, requests), SaveOrder)
        if order.save_id is None:
            return None
        extra = None
        if requests is not None:
            extra = ExtraState(requests[0].extra, [one.rank_extra for one in requests])
        draft = draft_path(self.path, captured.step, order.save_id)
        return AgreedSave(captured, order.save_id, draft, order.inventory, extra)

    def _order(self, step: int, requests: Sequence[SaveRequest]) -> SaveOrder:
        """Check the requests of the ranks; return the save of all ranks."""
        inventory = merge_inventories([RankInventory(request.inventory) for request in requests])
        if not any(request.previous_save_succeeded for request in requests):
            return SaveOrder(None, inventory)
        if len({request.step for request in requests}) > 1:
            raise _not_saved(step, f"the ranks are at steps {[request.step for request in requests]}")
        if step <= inventory.newest:
            raise CheckpointSaveError(
                f"step {step} cannot be saved",
                why=f"{self.path} already holds step {inventory.newest}, complete",
                fix="save later steps only; to go back, move the newer checkpoints away first",
            )
        return SaveOrder(os.urandom(8).hex(), inventory)

    # -- agreed -> planned --------------------------------------------------------------------------------------

    def _plan(self, agreed: AgreedSave) -> PlannedSave:
        """Create the draft, and assign the items to the ranks of the node."""
        with self.node.agreement.round() as ranks:
            extra = self._share_extra(agreed.extra)
            plan = plan_items(agreed.captured.state, max_item_nbytes=self.tuning.item_nbytes)
            plans = ranks.gather(RankPlan(encode_items(plan.items)))
            assignment = None
            if plans is not None:
                self._begin_draft(agreed)
                assignment = _assign(plans)
            assignment = ranks.broadcast(assignment, Assignment)
        items = [plan.items[position] for position in assignment.positions[self.node.rank]]
        return PlannedSave(agreed, plan, items, extra)

    def _share_extra(self, extra: ExtraState | None) -> ExtraState | None:
        """Send the extra state from the first rank to the first rank of each node, for its ``extra.json``."""
        if self.node.leaders is None:
            return None
        with self.node.leaders.round() as leaders:
            return leaders.broadcast(extra, ExtraState)

    def _begin_draft(self, agreed: AgreedSave) -> None:
        """Correct the tracker, put bad checkpoints aside, and create the draft's directory."""
        directory = self._own_directory
        if agreed.inventory.complete:
            directory.set_tracker(agreed.inventory.newest)
        directory.put_aside(sorted({*self.failed_verification, *agreed.inventory.uncommitted(directory)}))
        self.failed_verification.clear()  # their names are free again, for good checkpoints
        directory.begin(agreed.captured.step, agreed.save_id)

    # -- planned -> written -------------------------------------------------------------------------------------

    def _write(self, planned: PlannedSave) -> WrittenSave:
        """Write all files of this node. The state is released before the other ranks are waited for."""
        captured, draft = planned.agreed.captured, planned.agreed.draft
        with self.node.agreement.round() as ranks:
            reader = StateReader(captured.state, planned.plan, planned.items)
            try:
                entries = write_tensor_files(
                    self.fs, draft, self.agreement.rank, planned.items, planned.plan, reader, self.tuning
                )
            finally:
                reader.close()
            captured.state.close()
            written = ranks.gather(RankFiles(entries, self.fs.take_records(draft)))
            manifest = None if written is None else self._complete_draft(planned, written)
        return WrittenSave(captured, draft, manifest)

    def _complete_draft(self, planned: PlannedSave, ranks: Sequence[RankFiles]) -> Manifest:
        """Add the export, layout, extra state and manifest, about the files of all ranks of the node."""
        agreed, extra = planned.agreed, planned.extra
        assert extra is not None, "the first rank of a node has it"
        files = {name: record for one in ranks for name, record in one.files.items()}
        entries = [entry for one in ranks for entry in one.entries]
        manifest = self._manifest(agreed, files)
        if self.agreement.leads and agreed.captured.export is not None:
            self._export(agreed.captured.export, SavedTensors(CheckpointInfo(agreed.draft, manifest), entries))
        return seal(self.fs, agreed.draft, entries, {"all": extra.all, "ranks": extra.ranks}, manifest)

    def _export(self, export: Export, saved: SavedTensors) -> None:
        directory = saved.info.path / EXPORT_NAME
        self.fs.mkdir(directory)
        export(directory, saved)
        for path in sorted(directory.rglob("*")):
            if path.is_symlink():
                raise CheckpointSaveError(
                    f"the export made a symbolic link: {path.name}",
                    why="a checkpoint holds files only",
                    fix="write the file itself",
                )
            if path.is_file():
                self.fs.adopt_file(path)

    def _manifest(self, agreed: AgreedSave, files: Mapping[str, FileRecord]) -> Manifest:
        return Manifest(
            step=agreed.captured.step,
            save_id=agreed.save_id,
            world_size=len(self.agreement.ranks),
            weight_version=agreed.captured.weight_version,
            saved_unix_s=time.time(),
            versions={"hwrl": hwrl.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
            files=files,
            node=self.node.number,
            nodes=self.node.count,
        )

    # -- written -> committed, announced ------------------------------------------------------------------------

    def _commit(self, written: WrittenSave) -> CommittedSave:
        """Rename this node's draft. The checkpoint is complete when all nodes have."""
        if self.directory is not None:
            try:
                self.directory.commit(written.draft, written.captured.step)
            except OSError as exc:
                if written.draft.exists():
                    raise _not_saved(written.captured.step, _reason(exc)) from exc
                raise _not_finished(written.captured.step, exc) from exc
        return CommittedSave(written.captured, written.manifest)

    def _announce(self, committed: CommittedSave) -> None:
        """Have the tracker name the step, and call ``after_commit``."""
        if self.directory is not None:
            try:
                self.directory.set_tracker(committed.captured.step)
            except (OSError, CheckpointError) as exc:
                raise _not_finished(committed.captured.step, exc) from exc
            if self.agreement.leads:
                self._call_after_commit(committed)

    def _retain(self, step: int) -> None:
        """Remove checkpoints beyond the newest ``keep``.

        A tracker of the caller may name one of them until ``after_commit`` has returned: no node removes it earlier.
        """
        if self.directory is not None:
            try:
                self.directory.retain(self.keep)
            except (OSError, CheckpointError) as exc:
                raise _not_finished(step, exc) from exc

    def _call_after_commit(self, committed: CommittedSave) -> None:
        captured, manifest = committed.captured, committed.manifest
        if captured.after_commit is None:
            return
        assert manifest is not None, "the first rank leads its node"
        try:
            captured.after_commit(CheckpointInfo(self.path / step_name(captured.step), manifest))
        except Exception as exc:
            raise _callback_failed(captured.step, _reason(exc)) from exc

    def _remove_draft(self, draft: Path) -> bool:
        """Remove this node's draft if it is still one; return whether it was."""
        if self.directory is None or not draft.exists():
            return False
        self.directory.abandon(draft)
        return True

    @property
    def _own_directory(self) -> CheckpointDirectory:
        assert self.directory is not None, "the first rank of a node has one"
        return self.directory


# -- items and ranks ------------------------------------------------------------------------------------------------


def _assign(plans: Sequence[RankPlan]) -> Assignment:
    """Assign each item to one rank.

    A tensor goes to the rank with the least to write, any other value to the lowest rank: ranks may have different
    values of one name.
    """
    decoded = [decode_plan(plan.items) for plan in plans]
    kept = dedup_save_plans(_with_values_once(decoded))
    return Assignment([_positions(*pair) for pair in zip(decoded, kept, strict=True)])


def _with_values_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Keep each value that is no tensor on the lowest rank only."""
    taken: set[str] = set()
    once = []
    for plan in plans:
        values = {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
        new = values - taken
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO or item.index.fqn in new]
        taken |= values
        once.append(replace(plan, items=items))
    return once


def _positions(plan: SavePlan, kept: SavePlan) -> list[int]:
    position: dict[MetadataIndex, int] = {item.index: number for number, item in enumerate(plan.items)}
    return [position[item.index] for item in kept.items]


# -- errors ---------------------------------------------------------------------------------------------------------


def _reason(exc: Exception) -> str:
    if not isinstance(exc, HwrlError):
        return f"{type(exc).__name__}: {exc}"
    return f"{exc.what}; {exc.why}" if exc.why else exc.what  # another rank's foreign error has no `why`


def _not_saved(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} was not saved", why=why, fix="fix the cause and save again; the previous checkpoint is intact"
    )


def _not_finished(step: int, exc: OSError | CheckpointError) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} is complete, but its name may not be durable, or the steps after that were not all done",
        why=f"{exc.strerror}: {exc.filename}" if isinstance(exc, OSError) else _reason(exc),
        fix="fix the cause; the next save sets the tracker and removes old checkpoints",
    )


def _callback_failed(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} is complete, but its after_commit failed",
        why=why,
        fix="fix the cause; after_commit is not called again for this step, and the next save removes old checkpoints",
    )


def _in_doubt(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} may or may not be complete",
        why=why,
        fix="save a later step; resume finds the newest complete one",
    )
