"""Writes the tables of docs/ that the code decides: every key of the configuration, and what each backend can do.

`.venv/bin/python ci/docs/tables.py` writes them. The tests compare: with `--check` it only names outdated pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from pydantic.fields import FieldInfo

import hwrl_cpu
import hwrl_cuda
import hwrl_npu
import hwrl_rocm
import hwrl_xpu
from hwrl.interfaces import Capability
from hwrl.run.config import Config, Section

DOCS = Path(__file__).parents[2] / "docs"


def table(*rows: tuple[str, ...]) -> str:
    """Return a table in Markdown; its first row is the header."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows]
    return "".join([lines[0], "|---" * len(rows[0]) + "|\n", *lines[1:]])


def with_table(page: str, heading: str, new: str) -> str:
    """Return ``page`` with ``new`` in place of the first table below ``heading``."""
    before, found, rest = page.partition(f"\n## {heading}\n")
    body, *later = rest.split("\n## ")
    text, bar, old = body.partition("\n|")
    if not found or not bar:
        raise SystemExit(f"write the section '## {heading}' with a sentence and an empty table '|---|', for {new!r}")
    lines = (bar + old)[1:].splitlines(keepends=True)
    length = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return before + found + "\n## ".join([f"{text}\n{new}{''.join(lines[length:])}", *later])


def configuration(page: str) -> str:
    """Return docs/configuration.md with the tables of all sections."""
    fields = {name: field.annotation for name, field in Config.model_fields.items()}
    sections = {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Section)}
    top = {name: field for name, field in Config.model_fields.items() if name not in sections}
    page = with_table(page, "Top level", table(("key", "default", "meaning"), *map(_key, top.items())))
    for name, kind in sections.items():
        rows = map(_key, kind.model_fields.items())
        page = with_table(page, f"`{name}`", table(("key", "default", "meaning"), *rows))
    return page


def _key(item: tuple[str, FieldInfo]) -> tuple[str, str, str]:
    name, field = item
    default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
    return f"`{name}`", default, (field.description or "").replace("``", "`")


def backends(page: str) -> str:
    """Return docs/backends.md with the table of capabilities, each by the answer of the backend's ``supports``."""
    shipped = [
        hwrl_cpu.CpuBackend(hwrl_cpu.INFO),
        hwrl_cuda.CudaBackend(hwrl_cuda.INFO),
        hwrl_npu.NpuBackend(hwrl_npu.INFO),
        hwrl_rocm.RocmBackend(hwrl_rocm.INFO),
        hwrl_xpu.XpuBackend(hwrl_xpu.INFO),
    ]
    header = ("capability", *(f"`{backend.info.name}`" for backend in shipped))
    with mock.patch.object(hwrl_cuda, "_why_not_compiled", str):  # torch for the CPU comes without triton
        rows = [(f"`{one.value}`", *(backend.supports(one).state for backend in shipped)) for one in Capability]
    return with_table(page, "What each backend can do", table(header, *rows))


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield each page whose tables differ from the code, with its right text."""
    for name, write in {"configuration.md": configuration, "backends.md": backends}.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        if (right := write(page)) != page:
            yield DOCS / name, right


def main(words: list[str]) -> int:
    """Write the outdated pages; with ``--check`` return 1 if there are any."""
    found = list(outdated())
    for path, right in found:
        print(f"docs/{path.name} is outdated; run ci/docs/tables.py" if words else f"wrote docs/{path.name}")
        if not words:
            path.write_text(right, encoding="utf-8")
    return int(bool(words and found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
