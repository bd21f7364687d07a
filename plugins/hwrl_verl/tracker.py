"""verl's tracker of the steps in one folder: with asynchronous saves, it names a step when all of it is complete.

verl saves the actor, then the critic, then its data loader in ``global_step_N/data.pt``. So when that file is whole,
each part has begun its save. The folder must be shared by the workers and the driver.
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
_log = logging.getLogger("hwrl.verl")


def part_directory(folder: Path, part: str) -> Path:
    """Return the directory of the checkpoints of ``part``, "actor" or "critic"."""
    return folder / "hwrl" / part


def begin_part(folder: Path, part: str, step: int) -> None:
    """Note on the disk that ``part`` belongs to ``step``."""
    DurableFS().mkdir(folder / _name(step) / part)


def announce(folder: Path, part: str, step: int, *, timeout_s: float = 1800.0) -> None:
    """Wait until all of ``step`` is complete and verl's tracker names it; the first part of the step writes it.

    ``part`` is complete already. Raises CheckpointSaveError if the rest is not complete, or the tracker does not name
    it, within ``timeout_s``.
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
    if part == _parts(folder, step)[0]:  # there is one writer
        DurableFS().replace_file(folder / TRACKER_NAME, b"%d" % step)
    while announced(folder) != step:  # it may name a later one: the run went back to an earlier step
        wait(f"{folder / TRACKER_NAME} did not name it")


def announced(folder: Path) -> int:
    """Return the step in verl's tracker, -1 if there is none."""
    try:
        return int((folder / TRACKER_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return -1


def put_unannounced_aside(folder: Path, part: str, *, after: int) -> None:
    """Rename what a killed run left of steps that are newer than ``after`` and than the tracker; delete nothing.

    verl goes back to an earlier step then, and saves these steps again.
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
    data = folder / _name(step) / "data.pt"
    if not zipfile.is_zipfile(data):  # torch.save writes the end of the archive last
        return data
    parts = [part_directory(folder, part) / _name(step) for part in _parts(folder, step)]
    return next((path for path in parts if not path.is_dir()), None)


def _parts(folder: Path, step: int) -> list[str]:
    begun = [path.name for path in (folder / _name(step)).iterdir() if path.is_dir()]
    return sorted(name for name in begun if part_directory(folder, name).is_dir())


def _name(step: int) -> str:
    return f"global_step_{step}"
