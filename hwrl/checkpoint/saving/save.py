"""One save, from the plan to the commit: the steps that all ranks take together."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans  # what its planner calls first
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import hwrl
from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory, draft_path
from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.format.layout import Json, decode_plan, encode_plan, require_readable, write_torch_metadata
from hwrl.checkpoint.format.manifest import EXTRA_NAME, LAYOUT_NAME, MANIFEST_NAME, Manifest
from hwrl.checkpoint.saving.agreement import Agreement
from hwrl.checkpoint.saving.inventory import Survey, look, merge
from hwrl.checkpoint.saving.nodes import Node
from hwrl.checkpoint.saving.state import SaveSource
from hwrl.checkpoint.saving.tensor_files import write_items
from hwrl.errors import CheckpointError, CheckpointSaveError, HwrlError

EXPORT_NAME = "hf"


@dataclass(frozen=True)
class SaveJob:
    """What one rank brings to a save, which is the ``call``-th call. The saver closes ``source``."""

    call: int
    step: int
    weight_version: int
    source: SaveSource
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    export: Callable[[Path], object] | None
    goes_on: bool = True
    """Whether this rank's program goes on, and does not hear from the same call that the save before failed."""


@dataclass
class Saver:
    """Runs jobs, one at a time, on all ranks of ``agreement`` together."""

    directory: Path
    agreement: Agreement
    node: Node
    fs: DurableFS
    keep: int | None
    broken: list[Path] = field(default_factory=list)
    """Checkpoints whose content was found to be wrong, to be put aside by the next save."""
    _draft: Path | None = field(default=None, init=False)
    _extra: Json = field(default_factory=dict, init=False)
    """What goes into the file of that name, on the ranks that seal: of many ranks it is too much to send to each."""

    def refuse(self, call: int, step: int, error: Exception) -> NoReturn:
        """Take the place of :meth:`run` where this rank has no job: all ranks raise, and this one does not wait."""
        told: Exception = error
        if not isinstance(error, HwrlError):
            told = _failed(step, _reason(error))
            told.__cause__ = error

        def fail() -> NoReturn:
            raise told

        self.agreement.begin(call)
        self.agreement.vote(fail)
        raise told

    def run(self, job: SaveJob) -> None:
        """Write and commit ``job``; return when the checkpoint, its tracker and what is kept are on the disks."""
        sealed, self._extra = False, {}
        self.agreement.begin(job.call)
        try:
            opened = self.agreement.decide(lambda: self._offer(job), lambda offers: self._open(job, offers))
            if opened is None:
                return
            self.agreement.vote(lambda: self._prepare(job, opened))
            sealed = True
            self.agreement.vote(lambda: self._commit(job.step))
            self.agreement.vote(lambda: self._announce(job.step))
        except CheckpointSaveError:
            self._clean_up()
            raise
        except Exception as exc:  # the disk, a peer, the caller's export
            may_be_complete = sealed and self._draft is None  # rank 0 is silent, or was, and committed
            self._clean_up()
            raise (_in_doubt if may_be_complete else _failed)(job.step, _reason(exc)) from exc
        finally:
            job.source.close()

    def _offer(self, job: SaveJob) -> dict[str, Any]:
        home = self.node.home
        return {
            "step": job.step,
            "goes_on": job.goes_on,
            "extra": job.extra,
            "rank_extra": job.rank_extra,
            "holds": None if home is None else look(home, without=self.broken),
        }

    def _open(self, job: SaveJob, offers: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not any(offer["goes_on"] for offer in offers):
            return None
        if len({offer["step"] for offer in offers}) > 1:
            raise _failed(job.step, f"the ranks are at steps {[offer['step'] for offer in offers]}")
        survey = merge([offer["holds"] for offer in offers if offer["holds"] is not None])
        if job.step <= survey.newest:
            raise CheckpointSaveError(
                f"step {job.step} cannot be saved",
                why=f"{self.directory} already holds step {survey.newest}, complete",
                fix="save later steps only; to go back, move the newer checkpoints away first",
            )
        self._extra = {"all": offers[0]["extra"], "ranks": [offer["rank_extra"] for offer in offers]}
        return {"save_id": os.urandom(8).hex(), "survey": asdict(survey)}

    def _prepare(self, job: SaveJob, opened: dict[str, Any]) -> None:
        """Have all files of this node on its disk, under a draft's name."""
        node = self.node.agreement
        chosen = node.decide(lambda: self._plan(job), lambda plans: self._begin(job, opened, plans))
        draft = draft_path(self.directory, job.step, opened["save_id"])
        items = [job.source.plan.items[position] for position in chosen[self.node.rank]]
        node.decide(lambda: self._write(job, draft, items), lambda parts: self._seal(job, opened, draft, parts))

    def _plan(self, job: SaveJob) -> list[Json]:
        if self.node.firsts is not None:
            self._extra = self.node.firsts.decide(lambda: self._extra, lambda extras: extras[0])
        return encode_plan(job.source.make_plan())

    def _begin(self, job: SaveJob, opened: dict[str, Any], offers: list[list[Json]]) -> list[list[int]]:
        """Make the draft; return which items each rank of the node writes: what several hold is written by one.

        Of a tensor that is the one with the least to write, of anything else the lowest: ranks may have it differently.
        """
        home, survey = self._home, Survey(**opened["survey"])
        if survey.complete:
            home.set_tracker(survey.newest)
        home.put_aside(sorted({*self.broken, *survey.uncommitted(home)}))
        self.broken.clear()  # these names are free, and what is saved under them again is good
        plans = [decode_plan(offer) for offer in offers]
        self._draft = home.begin(job.step, opened["save_id"])
        return [_positions(*pair) for pair in zip(plans, dedup_save_plans(_with_values_once(plans)), strict=True)]

    def _write(self, job: SaveJob, draft: Path, items: list[WriteItem]) -> dict[str, Any]:
        entries = write_items(self.fs, draft, self.agreement.rank, items, job.source)
        job.source.close()  # before the other ranks are waited for
        if self.agreement.decides and job.export is not None:
            self._export(job.export, draft / EXPORT_NAME)
        return {
            "entries": entries,
            "files": {name: [one.nbytes, one.sha256] for name, one in self.fs.take_records(draft).items()},
        }

    def _seal(self, job: SaveJob, opened: dict[str, Any], draft: Path, parts: list[dict[str, Any]]) -> None:
        entries = [entry for part in parts for entry in part["entries"]]
        files = self.fs.take_records(draft)
        for part in parts:
            files |= {name: FileRecord(nbytes, sha256) for name, (nbytes, sha256) in part["files"].items()}
        seal(self.fs, draft, entries, self._extra, self._manifest(job, opened["save_id"], files))

    def _manifest(self, job: SaveJob, save_id: str, files: Mapping[str, FileRecord]) -> Manifest:
        return Manifest(
            step=job.step,
            save_id=save_id,
            world_size=len(self.agreement.ranks),
            weight_version=job.weight_version,
            saved_unix_s=time.time(),
            versions={"hwrl": hwrl.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
            files=files,
            node=self.node.number,
            nodes=self.node.count,
        )

    def _commit(self, step: int) -> None:
        """Rename this node's draft; the checkpoint is complete when all nodes have."""
        if self._draft is None:  # another rank of the node has it
            return
        try:
            self._home.commit(self._draft, step)
        except OSError as exc:
            if self._draft.exists():
                raise _failed(step, _reason(exc)) from exc
            self._draft = None
            raise _not_all_done(step, exc) from exc
        self._draft = None

    def _announce(self, step: int) -> None:
        if self.node.home is None:
            return
        try:
            self.node.home.set_tracker(step)
            self.node.home.retain(self.keep)
        except (OSError, CheckpointError) as exc:
            raise _not_all_done(step, exc) from exc

    def _export(self, export: Callable[[Path], object], directory: Path) -> None:
        self.fs.mkdir(directory)
        export(directory)
        for path in sorted(directory.rglob("*")):
            if path.is_symlink():
                raise CheckpointSaveError(
                    f"the export made a symbolic link: {path.name}",
                    why="a checkpoint holds files only",
                    fix="write the file itself",
                )
            if path.is_file():
                self.fs.adopt_file(path)

    @property
    def _home(self) -> CheckpointDirectory:
        assert self.node.home is not None, "the first rank of a node decides for it"
        return self.node.home

    def _clean_up(self) -> None:
        if self._draft is not None:
            self._home.abandon(self._draft)
        self._draft = None


def seal(fs: DurableFS, draft: Path, entries: list[Json], extra: Json, manifest: Manifest) -> None:
    """Add layout, extra state and manifest to a draft, whose other files the manifest names, and make it durable."""
    if manifest.nodes == 1:  # else torch's tools would take a node's part for the whole
        write_torch_metadata(fs, draft, entries)
    else:
        require_readable(entries)
    for name, content in {LAYOUT_NAME: entries, EXTRA_NAME: extra}.items():
        fs.write_file(draft / name, json.dumps(content).encode())
    whole = replace(manifest, files={**manifest.files, **fs.take_records(draft)}).to_bytes()
    Manifest.from_bytes(whole)  # raises for what could not be resumed
    fs.write_file(draft / MANIFEST_NAME, whole)
    fs.take_records(draft)
    for directory in [path for path in draft.rglob("*") if path.is_dir()] + [draft]:
        fs.sync_directory(directory)


def _with_values_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave to the lowest rank that has it what is no tensor."""
    taken: set[str] = set()
    once = []
    for plan in plans:
        values = {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO}
        mine = values - taken
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO or item.index.fqn in mine]
        taken |= values
        once.append(replace(plan, items=items))
    return once


def _positions(plan: SavePlan, kept: SavePlan) -> list[int]:
    position: dict[MetadataIndex, int] = {item.index: number for number, item in enumerate(plan.items)}
    return [position[item.index] for item in kept.items]


def _reason(exc: Exception) -> str:
    return f"{exc.what}; {exc.why}" if isinstance(exc, HwrlError) else f"{type(exc).__name__}: {exc}"


def _failed(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} was not saved", why=why, fix="mend the cause and save again; the previous checkpoint is intact"
    )


def _not_all_done(step: int, exc: OSError | CheckpointError) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} is complete, but its name may not be durable, or not all that follows was done",
        why=f"{exc.strerror}: {exc.filename}" if isinstance(exc, OSError) else _reason(exc),
        fix="mend the cause; the next save sets the tracker right and removes old checkpoints",
    )


def _in_doubt(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} may or may not be complete",
        why=why,
        fix="save a later step; resume finds the newest that is complete",
    )
