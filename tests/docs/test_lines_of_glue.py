"""docs/stacks.md counts the lines of glue as they are."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs/stacks.md").read_text(encoding="utf-8")
SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Return the number of lines without blanks, comments and docstrings."""
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    without = {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in SPACE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - without)


def test_lines_of_code_are_counted() -> None:
    assert code_lines('"""One."""\n\n# two\nx = """a\nb"""\ndef f(): ...\n') == 3


def test_the_plugins_have_the_lines_that_the_page_says() -> None:
    rows = re.findall(r"\| (\d+): (.*?) of `(\w+)` \|", PAGE)
    assert len(rows) == 6
    for said, modules, plugin in rows:
        files = [REPO / "plugins" / plugin / f"{module}.py" for module in re.findall(r"`(\w+)`", modules)]
        found = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
        assert abs(found - int(said)) <= 0.1 * found, f"{plugin}: {modules} have {found} lines of code"
    grown = sum(int(said) for said, _, _ in rows)
    by_hand = sum(map(int, re.findall(r"^\| \[.*?\| (\d+) \|", PAGE, re.MULTILINE)))
    assert f"from {by_hand} to {grown}:" in PAGE


def test_the_page_on_vllm_has_the_lines_that_the_table_says() -> None:
    (block,) = re.findall(r"```python\n(from hwrl.weights.*?)```", (REPO / "docs/vllm.md").read_text(), re.DOTALL)
    assert f"| {code_lines(block)}, and 1 argument of the server |" in PAGE
