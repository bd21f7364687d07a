"""The tracked files hold nothing of the machine on which they were written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
REVERSED = (  # so that this file names none
    "gro.ipyp gro.detsohnohtyp gro.hcrotyp.daolnwod gro.adnocana gro.sjmpn oi.setarc gro.gnalog.yxorp "
    "oi.rekcod oi.rchg oi.yauq oi.rcvn"
)
HOSTS = [name[::-1] for name in REVERSED.split()]
FOLDERS = ["home/[a-z][a-z0-9_-]*", "root", "work"]
LEFT = re.compile("|".join([*map(re.escape, HOSTS), rf"(?<![\w.~}}$/-])/(?:{'|'.join(FOLDERS)})(?![\w.-])"]))


def left_in(text: str) -> list[str]:
    """Return the names of registries, and the paths of a developer's machine, each with the number of its line."""
    return [f"{1 + text.count(chr(10), 0, found.start())} {found.group()}" for found in LEFT.finditer(text)]


@pytest.mark.parametrize("host", HOSTS)
def test_the_search_finds_a_registry(host: str) -> None:
    assert left_in(f'url = "https://files.{host}/packages/x.whl"')


@pytest.mark.parametrize("folder", ["home/jane", "root", "work"])
def test_the_search_finds_a_path_of_a_machine(folder: str) -> None:
    assert all(left_in(line) for line in (f"/{folder}", f'"/{folder}/hwrl"', f"cd /{folder}/x", f"PATH=/{folder}/bin:"))


@pytest.mark.parametrize("line", ["/worker", "a/work/b", "$HOME/root", "~/work", "../root", "/root.json", "/home/"])
def test_the_search_finds_nothing_else(line: str) -> None:
    assert not left_in(line)


def test_no_tracked_file_names_a_registry_or_a_path_of_a_machine() -> None:
    """pip's settings decide about the registry, and a path works on one machine only."""
    if not (REPO / ".git").exists():
        pytest.skip("no clone: git tracks no file here")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True).stdout
    found = []
    for name in tracked.decode().split("\0"):
        path = REPO / name
        if not path.is_file() or b"\0" in (content := path.read_bytes()):
            continue  # deleted here, or no text
        found += [f"{name}:{left}" for left in left_in(content.decode(errors="replace"))]
    assert not found, "\n".join(found)
