"""Write verl's tracker with asynchronous saves: it names a step only when all parts of the step are complete.

A *part* is the actor or the critic; a worker group saves each. In a step verl first calls the save of the actor, then
of the critic, and then writes its data loader to ``global_step_N/data.pt``. So when that file is whole, each part has
begun its save. Workers and driver must share the folder.
"""

from __future__ import annotations

import logging
import os
import time
import zipfile
from pathlib import Path

from hwrl.checkpoint import TRACKER_NAME, DurableFS
from hwrl.errors import CheckpointSaveError

LOOK_S = 0.02
"""Seconds between two looks at the disk."""
_log = logging.getLogger("hwrl.verl")


def part_directory(folder: Path, part: str) -> Path:
    """Return the directory of the checkpoints of ``part``, "actor" or "critic"."""
    return folder / "hwrl" / part


def begin_part(folder: Path, part: str, step: int) -> None:
    """Record that ``step`` has the part ``part``, by a directory on the disk."""
    DurableFS().mkdir(folder / _name(step) / part)


def announce(folder: Path, part: str, step: int, *, timeout_s: float = 1800.0) -> None:
    """Wait until all of ``step`` is complete, and until verl's tracker names it. Each complete ``part`` calls this.

    The first part, by name, writes the tracker. Raises CheckpointSaveError if the step is not complete, or the tracker
    does not name it, within ``timeout_s``.
    """
    begun_s = time.monotonic()

    def wait(lacks: str) -> None:
        if time.monotonic() - begun_s > timeout_s:
            raise CheckpointSaveError(
                f"step {step} of {part} is complete, but verl's step is not",
                why=f"{lacks} within {timeout_s:g} s",
                fix="look at the logs of the other workers; the tracker names an earlier step, which is still there",
            )
        time.sleep(LOOK_S)

    while lacking := _lacking(folder, step):
        wait(f"{lacking} was not there")
    if part == _parts(folder, step)[0]:  # so there is one writer
        DurableFS().replace_file(folder / TRACKER_NAME, b"%d" % step)
    while announced(folder) != step:  # a tracker of a later step does not count: the run may have gone back
        wait(f"{folder / TRACKER_NAME} did not name it")


def announced(folder: Path) -> int:
    """Return the step that verl's tracker names; -1 if it names none."""
    try:
        return int((folder / TRACKER_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return -1


def put_unannounced_aside(folder: Path, part: str, *, after: int) -> None:
    """Rename what a killed run has left of steps later than ``after`` and than the tracker's. Deletes nothing.

    verl resumes at an earlier step then, and saves these steps again under the same names.
    """
    last = max(after, announced(folder))
    left = [*part_directory(folder, part).glob("global_step_*"), *folder.glob("global_step_*/data.pt")]
    for path in left:
        step = path.name if path.is_dir() else path.parent.name
        number = step.rpartition("_")[2]
        if number.isdecimal() and int(number) > last:
            _log.warning("%s is put aside: the run ended before all of this step was saved", path)
            path.rename(path.with_name(f".unannounced_{path.name}.{os.urandom(4).hex()}"))


def _lacking(folder: Path, step: int) -> Path | None:
    """Return a path that ``step`` still lacks; None if the step is complete."""
    data = folder / _name(step) / "data.pt"
    if not zipfile.is_zipfile(data):  # whole: torch.save writes the end of the archive last
        return data
    parts = [part_directory(folder, part) / _name(step) for part in _parts(folder, step)]
    return next((path for path in parts if not path.is_dir()), None)


def _parts(folder: Path, step: int) -> list[str]:
    """Return the parts that have begun their save of ``step``, sorted."""
    begun = [path.name for path in (folder / _name(step)).iterdir() if path.is_dir()]
    return sorted(name for name in begun if part_directory(folder, name).is_dir())


def _name(step: int) -> str:
    return f"global_step_{step}"
