"""Makes links of docs/ to other files of the repository work in the site, as they do on GitHub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPO = Path(__file__).parents[2]
_ABOVE = re.compile(r"\]\((\.\./[^)#\s]+)[^)\s]*\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Copy each linked file of the repository into the site, as text, and link to the copy."""
    from mkdocs.structure.files import File

    def to_copy(link: re.Match[str]) -> str:
        folder = (REPO / "docs" / page.file.src_uri).parent
        name = os.path.relpath(folder / link[1], REPO)
        if name.startswith("docs/"):
            return link[0]
        copy = f"source/{name}.txt"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, content=(REPO / name).read_text(encoding="utf-8")))
        return f"]({os.path.relpath(REPO / 'docs' / copy, folder)})"

    return _ABOVE.sub(to_copy, markdown)
