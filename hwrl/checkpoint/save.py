"""The save of one step, from the captured state to the commit and retention: :class:`Saver`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans  # what torch's planner does first
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

import hwrl
from hwrl.checkpoint.agreement import Agreement
from hwrl.checkpoint.directory import CheckpointDirectory, draft_path
from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.inventory import RankInventory, merge_inventories
from hwrl.checkpoint.layout import decode_plan, encode_items
from hwrl.checkpoint.load import SavedTensors
from hwrl.checkpoint.manifest import CheckpointInfo, Manifest, step_name
from hwrl.checkpoint.nodes import Node
from hwrl.checkpoint.seal import seal
from hwrl.checkpoint.stages import (
    AgreedSave,
    Assignment,
    CapturedSave,
    CommittedSave,
    Export,
    ExtraState,
    PlannedSave,
    RankFiles,
    RankPlan,
    SaveDecision,
    SaveRequest,
    WrittenSave,
)
from hwrl.checkpoint.state import CapturedStateReader, plan_items
from hwrl.checkpoint.tensor_files import write_tensor_files
from hwrl.checkpoint.tuning import SaveTuning
from hwrl.errors import CheckpointError, CheckpointSaveError, HwrlError
from hwrl.files import LOST

EXPORT_NAME = "hf"
"""The directory in a checkpoint for the files of ``export``."""


@dataclass(frozen=True)
class Saver:
    """Saves steps, one at a time. All ranks of ``agreement`` do it together.

    ``path`` is the checkpoint directory. ``directory`` is None except on node leaders: only they create drafts, and
    rename and remove drafts and checkpoints. Every rank writes its files into the draft.

    ``failed_verification`` lists checkpoints in which a file had a wrong hash or could not be read. :class:`Resumer`
    shares this list and fills it, on every rank. At the next save, each node leader puts these checkpoints aside and
    empties its list.
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

        When this returns, the checkpoint is durable, the tracker names it, and retention has removed old checkpoints.
        But if every rank has a pending error, nothing is saved. Raises CheckpointSaveError on all ranks if one rank
        fails.
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
        """Call this instead of :meth:`save` on a rank that could not capture its state.

        Raises ``error`` if it is an hwrl error, and CheckpointSaveError otherwise. The other ranks raise a
        CheckpointSaveError in :meth:`save`.
        """
        self.agreement.begin_call(call)
        with self.agreement.vote():
            if isinstance(error, HwrlError):
                raise error
            raise _not_saved(step, _reason(error)) from error
        raise AssertionError("the vote has failed")

    def _save_agreed(self, agreed: AgreedSave) -> None:
        """Write, commit, announce, and remove old checkpoints.

        Each of these four actions is a vote. So no rank begins an action before all ranks have succeeded in the
        previous one. If a rank cannot read the decision of the first vote, its error says that the step was not saved,
        although the others may go on.
        """
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
        except Exception as exc:  # a rank fell silent or the store failed, so others may have gone on
            may_be_complete = not self._remove_draft(agreed.draft)  # while this draft exists, the step is incomplete
            raise (_in_doubt if may_be_complete else _not_saved)(step, _reason(exc)) from exc

    # -- captured -> agreed -------------------------------------------------------------------------------------

    def _agree(self, captured: CapturedSave) -> AgreedSave | None:
        """Agree with all ranks on this save. Return None if every rank has a pending error: nothing is saved then."""
        with self.agreement.round() as ranks:
            own = RankInventory.read(self.directory, without=self.failed_verification)
            request = SaveRequest(
                captured.step,
                captured.has_pending_error,
                captured.extra,
                captured.rank_extra,
                inventory=own.node,
            )
            requests = ranks.gather(request)
            decision = None if requests is None else self._decide(captured.step, requests)
            decision = ranks.broadcast(decision, SaveDecision)
        if decision.save_id is None:
            return None
        extra = None
        if requests is not None:
            extra = ExtraState(requests[0].extra, [request.rank_extra for request in requests])
        draft = draft_path(self.path, captured.step, decision.save_id)
        return AgreedSave(captured, decision.save_id, draft, decision.inventory, extra)

    def _decide(self, step: int, requests: Sequence[SaveRequest]) -> SaveDecision:
        """On rank 0, check the requests of all ranks and decide what they save."""
        inventory = merge_inventories([RankInventory(request.inventory) for request in requests])
        if all(request.has_pending_error for request in requests):
            return SaveDecision(None, inventory)
        if len({request.step for request in requests}) > 1:
            raise _not_saved(step, f"the ranks called save with different steps: {[req.step for req in requests]}")
        if step <= inventory.newest:
            raise CheckpointSaveError(
                f"step {step} cannot be saved",
                why=f"{self.path} already has the complete step {inventory.newest}",
                fix="save a later step; to go back to an earlier one, first move the newer checkpoints away",
            )
        return SaveDecision(os.urandom(8).hex(), inventory)

    # -- agreed -> planned --------------------------------------------------------------------------------------

    def _plan(self, agreed: AgreedSave) -> PlannedSave:
        """Create this node's draft, and divide the items among the ranks of the node."""
        with self.node.agreement.round() as ranks:
            extra = self._share_extra(agreed.extra)
            plan = plan_items(agreed.captured.state, max_item_nbytes=self.tuning.max_item_nbytes)
            plans = ranks.gather(RankPlan(encode_items(plan.items)))
            assignment = None
            if plans is not None:
                self._prepare_draft(agreed)
                assignment = _assign(plans)
            assignment = ranks.broadcast(assignment, Assignment)
        items = [plan.items[position] for position in assignment.positions[self.node.rank]]
        return PlannedSave(agreed, plan, items, extra)

    def _share_extra(self, extra: ExtraState | None) -> ExtraState | None:
        """Send the extra state from rank 0 to all node leaders, which write ``extra.json``."""
        if self.node.leaders is None:
            return None
        with self.node.leaders.round() as leaders:
            return leaders.broadcast(extra, ExtraState)

    def _prepare_draft(self, agreed: AgreedSave) -> None:
        """Correct the tracker, put aside checkpoints that cannot be resumed, and create the draft."""
        directory = self._own_directory
        if agreed.inventory.complete:
            directory.set_tracker(agreed.inventory.newest)
        directory.put_aside(sorted({*self.failed_verification, *agreed.inventory.uncommitted(directory)}))
        self.failed_verification.clear()  # later checkpoints with these names will be intact
        directory.create_draft(agreed.captured.step, agreed.save_id)

    # -- planned -> written -------------------------------------------------------------------------------------

    def _write(self, planned: PlannedSave) -> WrittenSave:
        """Write all files of this node. The state is released as soon as this rank's items are written."""
        captured, draft = planned.agreed.captured, planned.agreed.draft
        with self.node.agreement.round() as ranks:
            reader = CapturedStateReader(captured.state, planned.plan, planned.items)
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
        """On the node leader, add the export, layout, extra state and manifest to the files that ``ranks`` wrote."""
        agreed, extra = planned.agreed, planned.extra
        assert extra is not None, "a node leader has it"
        files = {name: record for rank_files in ranks for name, record in rank_files.files.items()}
        entries = [entry for rank_files in ranks for entry in rank_files.entries]
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
                    f"the export created a symbolic link: {path.name}",
                    why="a checkpoint may contain only regular files",
                    fix="write the content into a file",
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
        """On the node leader, give the draft its final name. When all nodes have done so, the step is complete."""
        if self.directory is not None:
            try:
                self.directory.commit(written.draft, written.captured.step)
            except OSError as exc:
                if exc.errno == LOST or written.draft.exists():
                    raise _not_saved(written.captured.step, _reason(exc)) from exc
                raise _not_durable(written.captured.step, exc) from exc
        return CommittedSave(written.captured, written.manifest)

    def _announce(self, committed: CommittedSave) -> None:
        """On the node leader, set the tracker to the step. On rank 0, then call ``after_commit``."""
        if self.directory is not None:
            try:
                self.directory.set_tracker(committed.captured.step)
            except (OSError, CheckpointError) as exc:
                raise _not_finished(committed.captured.step, exc) from exc
            if self.agreement.leads:
                self._call_after_commit(committed)

    def _retain(self, step: int) -> None:
        """On the node leader, remove all but the newest ``keep`` checkpoints.

        Until ``after_commit`` has returned, a tracker of the caller may name an old checkpoint. So no node removes one
        before that: this is a vote of its own.
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
        assert manifest is not None, "rank 0 is the leader of its node"
        try:
            captured.after_commit(CheckpointInfo(self.path / step_name(captured.step), manifest))
        except Exception as exc:
            raise _callback_failed(captured.step, _reason(exc)) from exc

    def _remove_draft(self, draft: Path) -> bool:
        """On the node leader, remove the draft if it still exists. Return whether it existed."""
        if self.directory is None or not draft.exists():
            return False
        self.directory.remove_draft(draft)
        return True

    @property
    def _own_directory(self) -> CheckpointDirectory:
        assert self.directory is not None, "a node leader has one"
        return self.directory


# -- items and ranks ------------------------------------------------------------------------------------------------


def _assign(plans: Sequence[RankPlan]) -> Assignment:
    """Assign each item to one rank of the node.

    If several ranks have the same item of a tensor, the rank with the fewest bytes to write gets it. A non-tensor value
    goes to the lowest rank with its name, because different ranks may have different values. This is done for each node
    separately: an item on two nodes is written on both.
    """
    decoded = [decode_plan(plan.items) for plan in plans]
    kept = dedup_save_plans(_keep_lowest_values(decoded))
    return Assignment([_positions(*pair) for pair in zip(decoded, kept, strict=True)])


def _keep_lowest_values(plans: list[SavePlan]) -> list[SavePlan]:
    """Remove each non-tensor value from all plans but the first that has it."""
    taken: set[str] = set()
    reduced = []
    for plan in plans:
        values = {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
        new = values - taken
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO or item.index.fqn in new]
        taken |= values
        reduced.append(replace(plan, items=items))
    return reduced


def _positions(plan: SavePlan, kept: SavePlan) -> list[int]:
    position: dict[MetadataIndex, int] = {item.index: number for number, item in enumerate(plan.items)}
    return [position[item.index] for item in kept.items]


# -- errors ---------------------------------------------------------------------------------------------------------


def _reason(exc: Exception) -> str:
    if not isinstance(exc, HwrlError):
        return f"{type(exc).__name__}: {exc}"
    return f"{exc.what}; {exc.why}" if exc.why else exc.what  # an error of another rank may have no `why`


def _not_saved(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} was not saved", why=why, fix="fix the cause and save again; resume loads the newest complete step"
    )


def _not_durable(step: int, exc: OSError) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} is complete on this disk, but its name may not be durable",
        why=f"{exc.strerror}: {exc.filename}",
        fix="fix the cause and save a later step; with several nodes, this step is complete if all nodes have it",
    )


def _not_finished(step: int, exc: OSError | CheckpointError) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} is complete, but the tracker was not set or old checkpoints were not removed",
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
    """Return the error of a rank that lost contact during the commit or later. (Later, the step is complete.)"""
    return CheckpointSaveError(
        f"step {step} may or may not be complete",
        why=why,
        fix="save a later step; resume loads the newest complete step in any case",
    )
