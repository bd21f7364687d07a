"""One save, from the plan to the commit: the steps that all ranks take together."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

import hwrl
from hwrl.checkpoint.agreement import Agreement
from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.home import CheckpointHome
from hwrl.checkpoint.layout import LAYOUT_NAME, decode_plan, decode_result, encode_entry, encode_plan
from hwrl.checkpoint.manifest import MANIFEST_NAME, Manifest
from hwrl.checkpoint.staging import SaveItems
from hwrl.errors import CheckpointSaveError, HwrlError

EXTRA_NAME = "extra.json"
EXPORT_NAME = "hf"


@dataclass(frozen=True)
class SaveJob:
    """What one rank brings to a save. ``source`` gives the data of each item of ``plan``; the saver closes it."""

    step: int
    weight_version: int
    plan: SavePlan
    source: SaveItems
    extra: Mapping[str, Any]
    rank_extra: Mapping[str, Any]
    export: Callable[[Path], object] | None


@dataclass
class Saver:
    """Runs jobs, one at a time. ``home`` is there on rank 0 only: it creates the directory and commits it."""

    directory: Path
    agreement: Agreement
    fs: DurableFS
    home: CheckpointHome | None
    keep: int | None
    broken: list[Path] = field(default_factory=list)
    """Checkpoints whose content was found to be wrong, to be put aside by the next save."""
    _draft: Path | None = field(default=None, init=False)
    _metadata: Metadata | None = field(default=None, init=False)

    def run(self, job: SaveJob) -> None:
        """Write and commit ``job``; return when the checkpoint, its tracker and what is kept are on the disk."""
        sealed = False
        try:
            opened = self.agreement.decide(lambda: _offer(job), lambda offers: self._open(job, offers))
            draft = self.directory / opened["draft"]
            chosen = opened["chosen"][self.agreement.rank]
            self.agreement.decide(lambda: self._write(job, draft, chosen), lambda parts: self._seal(job, draft, parts))
            sealed = True
            # A round of its own: a rank 0 that was given up while it wrote must not commit when it goes on.
            self.agreement.decide(lambda: None, lambda parts: self._publish(draft, job.step))
        except CheckpointSaveError:
            self._clean_up()
            raise
        except Exception as exc:  # the disk, a peer, the caller's export
            may_be_complete = sealed and self._draft is None  # rank 0 is silent, or was, and committed
            self._clean_up()
            raise (_in_doubt if may_be_complete else _failed)(job.step, _reason(exc)) from exc
        finally:
            job.source.close()

    def _open(self, job: SaveJob, offers: list[dict[str, Any]]) -> dict[str, Any]:
        assert self.home is not None, "rank 0 decides"
        if len({offer["step"] for offer in offers}) > 1:
            raise _failed(job.step, f"the ranks are at steps {[offer['step'] for offer in offers]}")
        self.home.put_aside(self.broken)
        self.broken.clear()
        newest = max((info.step for info in self.home.complete()), default=-1)
        if job.step <= newest:
            raise CheckpointSaveError(
                f"step {job.step} cannot be saved",
                why=f"{self.directory} already holds step {newest}, complete",
                fix="save later steps only; to go back, move the newer checkpoints away first",
            )
        plans = [decode_plan(offer["plan"]) for offer in offers]
        deduplicated, self._metadata = DefaultSavePlanner().create_global_plan(plans)
        self._draft = self.home.begin(job.step, os.urandom(8).hex())
        return {
            "draft": self._draft.name,
            "chosen": [_positions(*pair) for pair in zip(plans, deduplicated, strict=True)],
        }

    def _write(self, job: SaveJob, draft: Path, chosen: list[int]) -> dict[str, Any]:
        items = [job.plan.items[position] for position in chosen]
        writer = self._writer(draft)
        # The writer names files by the position of a plan in the list.
        ours = writer.prepare_global_plan([SavePlan([])] * self.agreement.rank + [SavePlan(items)])[-1]
        results = {result.index: result for result in writer.write_data(ours, job.source).wait()}
        job.source.close()  # before the other ranks are waited for
        if self.agreement.rank == 0 and job.export is not None:
            self._export(job.export, draft / EXPORT_NAME)
        return {
            "entries": [encode_entry(item, results[item.index]) for item in items],
            "files": {name: [one.nbytes, one.sha256] for name, one in self.fs.take_records(draft).items()},
            "extra": job.rank_extra,
        }

    def _seal(self, job: SaveJob, draft: Path, parts: list[dict[str, Any]]) -> None:
        assert self._metadata is not None, "rank 0 opened it"
        entries = [part["entries"] for part in parts]
        self._writer(draft).finish(self._metadata, [[decode_result(entry) for entry in rank] for rank in entries])
        self._write_json(draft / LAYOUT_NAME, [entry for rank in entries for entry in rank])
        self._write_json(draft / EXTRA_NAME, {"all": job.extra, "ranks": [part["extra"] for part in parts]})
        files = self.fs.take_records(draft)
        for part in parts:
            files |= {name: FileRecord(nbytes, sha256) for name, (nbytes, sha256) in part["files"].items()}
        self.fs.write_file(draft / MANIFEST_NAME, _manifest(job, draft, files, world_size=len(parts)).to_bytes())
        self.fs.take_records(draft)
        for directory in [path for path in draft.rglob("*") if path.is_dir()] + [draft]:
            self.fs.sync_directory(directory)

    def _publish(self, draft: Path, step: int) -> None:
        assert self.home is not None, "rank 0 decides"
        try:
            self.home.commit(draft, step)
            self._draft = None
            self.home.set_tracker()
            self.home.retain(self.keep)
        except OSError as exc:
            if draft.exists():
                raise _failed(step, _reason(exc)) from exc
            self._draft = None
            raise CheckpointSaveError(
                f"step {step} is complete, but its name may not be durable, or not all that follows was done",
                why=f"{exc.strerror}: {exc.filename}",
                fix="mend the cause; the next save sets the tracker right and removes old checkpoints",
            ) from exc

    def _writer(self, draft: Path) -> FileSystemWriter:
        # DurableFS syncs, after it flushed. Nothing is read ahead: who is asked for an item takes the last as written.
        writer = FileSystemWriter(draft, sync_files=False, per_thread_copy_ahead=0)
        writer.fs = self.fs
        return writer

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

    def _write_json(self, path: Path, value: Any) -> None:
        self.fs.write_file(path, json.dumps(value).encode())

    def _clean_up(self) -> None:
        if self.home is not None and self._draft is not None:
            self.home.abandon(self._draft)
        self._draft = None


def _offer(job: SaveJob) -> dict[str, Any]:
    return {"step": job.step, "plan": encode_plan(job.plan)}


def _positions(plan: SavePlan, kept: SavePlan) -> list[int]:
    position: dict[MetadataIndex, int] = {item.index: number for number, item in enumerate(plan.items)}
    return [position[item.index] for item in kept.items]


def _manifest(job: SaveJob, draft: Path, files: Mapping[str, FileRecord], *, world_size: int) -> Manifest:
    return Manifest(
        step=job.step,
        save_id=draft.name.rpartition(".")[2],
        world_size=world_size,
        weight_version=job.weight_version,
        saved_unix_s=time.time(),
        versions={"hwrl": hwrl.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        files=files,
    )


def _reason(exc: Exception) -> str:
    return f"{exc.what}; {exc.why}" if isinstance(exc, HwrlError) else f"{type(exc).__name__}: {exc}"


def _failed(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} was not saved", why=why, fix="mend the cause and save again; the previous checkpoint is intact"
    )


def _in_doubt(step: int, why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"step {step} may or may not be complete",
        why=why,
        fix="save a later step; resume finds the newest that is complete",
    )
