"""The log of a run in its directory: what a resume appends to."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from hwrl.run.report import PlainView, RecordedView, read_lines
from hwrl.run.report.views import EVENTS


def log_a_run(directory: Path) -> None:
    view = RecordedView(PlainView(1, stream=io.StringIO()), directory)
    with view:
        view.end("done")


@pytest.mark.parametrize("torn_nbytes", [0, 1, 10])
def test_a_resume_begins_a_line_of_its_own_after_one_without_an_end(tmp_path: Path, torn_nbytes: int) -> None:
    """A full disk or a power loss has cut the last line."""
    log_a_run(tmp_path)
    path = tmp_path / EVENTS
    path.write_bytes(path.read_bytes()[: -torn_nbytes or None])
    log_a_run(tmp_path)
    kinds = [event["kind"] for _, event in read_lines(path) if event is not None]
    assert kinds == ["start", *(["end"] if torn_nbytes < 2 else []), "start", "end"]
    assert b"\n\n" not in path.read_bytes()
