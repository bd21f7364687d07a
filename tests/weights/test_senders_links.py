"""Two senders over slow links: hosts in network namespaces, each with a cable of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long(40), pytest.mark.extended]  # it compares times, and a busy machine spoils them
_SCRIPT = Path(__file__).parents[2] / "ci" / "senders.py"
_CANNOT_RUN = 77


def test_two_senders_use_both_of_their_links(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    words = ["--mib", "8", "--gbit", "0.1", "--rounds", "1", "--json", str(target)]
    environment = {**os.environ, "HWRL_BACKEND": "cpu"}
    ended = subprocess.run([sys.executable, str(_SCRIPT), *words], capture_output=True, text=True, env=environment)
    if ended.returncode == _CANNOT_RUN:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = json.loads(target.read_text())["seconds"].values()
    assert one > 8 * 1.048576 * 8 / 100, "faster than its link"
    assert one / two > 1.3
