"""The Python examples of the README and of pages that need one process run as printed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["../README.md", "checkpoints.md", "memory.md", "training.md"])
def test_the_example_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    if page == "checkpoints.md":
        assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"
