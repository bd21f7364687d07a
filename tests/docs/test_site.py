"""`make docs` builds a site without a warning, and a browser shows its pages as they are meant."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.browser import browser as browser

pytestmark = pytest.mark.skipif(
    find_spec("material") is None, reason="mkdocs-material is not installed: run make test-stack-docs"
)
REPO = Path(__file__).parents[2]
PAGES = sorted(str(page.relative_to(REPO / "docs").with_suffix("")) for page in REPO.glob("docs/**/*.md"))
WIDTHS = {"desktop": 1300, "phone": 390}


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    config = str(REPO / "ci/docs/mkdocs.yml")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", str(site)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(built))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def resize(browser: Browser, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)


def test_every_page_is_in_the_navigation_and_linked_files_are_in_the_site(built: Path) -> None:
    index = (built / "index.html").read_text()
    assert not [page for page in PAGES if f'href="{page}.html"' not in index]
    assert "source/hwrl/interfaces/groups.py.txt" in (built / "workflows.html").read_text()
    assert "class Trajectory" in (built / "source/hwrl/interfaces/groups.py.txt").read_text()


def test_the_pages_in_a_browser(browser: Browser, address: str) -> None:
    titles = {"index": "Start - hwrl", "configuration": "Configuration - hwrl", "backends": "Devices - hwrl"}
    for page, title in titles.items():
        browser.open(f"{address}/{page}.html")
        assert browser.evaluate("document.title") == title
        tabs = browser.evaluate("[...document.querySelectorAll('.md-tabs__link')].map(tab => tab.textContent.trim())")
        assert tabs[0] == "Start" and "Train" in tabs and "In your stack" in tabs
        assert browser.evaluate("document.querySelectorAll('table tbody tr').length") >= 5
    rows = "[...document.querySelectorAll('td:first-child')].map(cell => cell.textContent)"
    assert "device_ipc" in browser.evaluate(rows)
    assert browser.problems == []
    assert [request for request in browser.requests if not request.startswith((address, "data:", "blob:"))] == []


UNREAD = r"""
[...document.querySelectorAll('article p')].map(part => part.textContent)
    .filter(text => /^\s*\|.*\|\s*$|^ *([-*]|\d+\.) |```|\]\(/m.test(text))
"""
"""Paragraphs with Markdown that was not understood: a table, a list, a fence or a link."""


def test_every_page_fits_and_has_no_markdown_left(browser: Browser, address: str) -> None:
    wide, unread = [], []
    for page in PAGES:
        browser.open(f"{address}/{page}.html")
        unread += [(page, text) for text in browser.evaluate(UNREAD)]
        for name, width in WIDTHS.items():
            resize(browser, width)
            if (found := browser.evaluate("document.documentElement.scrollWidth")) > width:
                wide.append((page, name, found))
    assert not unread
    assert not wide
    assert browser.problems == []


def test_the_search_finds(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html?q=staleness_threshold")
    browser.evaluate("""
        new Promise(done => {
            const look = () => document.querySelector('.md-search-result__link') ? done() : setTimeout(look, 20);
            look();
        })
    """)
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    assert any("configuration.html" in link for link in browser.evaluate(links))
