"""The examples of docs/comm.md and docs/weights.md run as printed; those that start processes, as scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def _examples() -> list[tuple[str, str]]:
    pages = {page: (DOCS / page).read_text(encoding="utf-8") for page in ("comm.md", "weights.md")}
    pattern = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    return [
        (f"{page} {number}", code) for page, text in pages.items() for number, code in enumerate(pattern.findall(text))
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in _examples()])
def test_the_example_runs(code: str, tmp_path: Path) -> None:
    if "__main__" not in code:
        exec(compile(code, "an example", "exec"), {})
        return
    script = tmp_path / "example.py"  # its processes import it
    script.write_text(code)
    environment = os.environ | {"HWRL_BACKEND": "cpu"}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
