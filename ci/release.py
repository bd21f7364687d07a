"""Build what a release publishes, in dist/, check it and try it. Nothing is uploaded. ``make release`` runs this.

dist/ then has the wheel, the source archive, and the release notes: the changelog's section of this version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
DIST = REPO / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
TRIAL = """
import hwrl
from hwrl.cli import main
assert "site-packages" in hwrl.__file__, hwrl.__file__
assert hwrl.__version__ == {version!r}, hwrl.__version__
assert hwrl.get_backend().device().type == "cpu"
assert main(["bench"]) == 1, "benchmarks are not in the wheel"
"""


def version() -> str:
    """Return the version in hwrl/__init__.py."""
    return re.findall(r'^__version__ = "(.+)"$', (REPO / "hwrl/__init__.py").read_text(), re.MULTILINE)[0]


def notes(changelog: str, version: str) -> str:
    """Return the changelog's section of ``version``; its title is the version, without what stands behind it."""
    section = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        sys.exit(f"ci/release: CHANGELOG.md has no section ## {version}, or it is empty")
    return f"# hwrl {version}\n\n{section[1].strip()}\n"


def find_pythons() -> dict[str, str | None]:
    """Return the path of each Python that hwrl supports; None if this machine does not have it.

    A shim of pyenv exists for a Python that it cannot start, too.
    """
    found = {name: shutil.which(f"python{name}") for name in PYTHONS}
    return {name: path if path and starts(path) else None for name, path in found.items()}


def starts(python: str) -> bool:
    """Return whether ``python`` can be started."""
    return subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0


def run(*words: str | Path, env: dict[str, str] | None = None, cwd: Path = REPO) -> None:
    """Run a command; end this program with its status if it fails."""
    print("ci/release:", *words, flush=True)
    status = subprocess.run([*map(str, words)], cwd=cwd, env={**os.environ, **(env or {})}, check=False).returncode
    if status:
        sys.exit(status)


def build() -> list[Path]:
    """Build the wheel, from the source archive, and check both; return their paths."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    built = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    run(sys.executable, "-m", "check_manifest", "--no-build-isolation")
    return built


def try_wheel(wheel: Path, python: str) -> None:
    """Install the wheel in a new environment of ``python``, outside of the tree, and run a few calls.

    The Python of .venv takes the dependencies from there; for another one pip downloads them.
    """
    base = REPO / ".venv/bin/python"
    version_of = ["-c", "import sys; print(sys.version_info[:2])"]
    found, own = (subprocess.check_output([path, *version_of]) for path in (python, str(base)))
    with tempfile.TemporaryDirectory(prefix="hwrl-release-") as work:
        fresh = Path(work) / "venv"
        if found == own:
            run("ci/fresh", wheel, fresh, env={"PYTHON": str(base)})
        else:
            run(python, "-m", "venv", fresh)
            run(fresh / "bin/python", "-m", "pip", "install", "-q", wheel)
        run(fresh / "bin/python", "-c", TRIAL.format(version=version()), env={"HWRL_BACKEND": "cpu"}, cwd=Path(work))


def main() -> None:
    """Build, check, try; end with a status other than 0 at the first failure."""
    text = notes((REPO / "CHANGELOG.md").read_text(), version())
    wheel = next(path for path in build() if path.suffix == ".whl")
    pythons = find_pythons()
    for python in filter(None, pythons.values()):
        try_wheel(wheel, python)
    (DIST / f"NOTES-{version()}.md").write_text(text)
    print("\n".join(["dist/ has:", *sorted(f"  {path.name}" for path in DIST.iterdir())]))
    tried, missing = ([name for name in pythons if (pythons[name] is None) == absent] for absent in (False, True))
    print(
        f"the wheel works with Python {', '.join(tried) or 'none'}; not on this machine: {', '.join(missing) or 'none'}"
    )


if __name__ == "__main__":
    main()
