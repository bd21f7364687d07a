"""A real browser for tests, driven through a pipe by the DevTools protocol. No package and no port is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """Return the browser of HWRL_TEST_BROWSER, or an installed one that speaks the protocol."""
    return os.environ.get("HWRL_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


_AT_3_AND_4 = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Runs the browser with its pipe at the file descriptors of the protocol."""


class Browser:
    """A headless browser with one page. ``problems`` are errors of its scripts, violations of its policy, and so on."""

    def __init__(self, executable: str, profile: Path) -> None:
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command = [sys.executable, "-c", _AT_3_AND_4, str(commands), str(answers), executable, *flags]
        self._process = subprocess.Popen(
            command,
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._next, self._session = b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path | str) -> None:
        """Open a file or an address, and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1300, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while self._take()["method"] != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Return the value of ``expression`` in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, **more)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._take()).get("id") != self._next:
            pass
        assert "result" in answer, answer
        return dict(answer["result"])

    def _take(self) -> dict[str, Any]:
        """Return the next message; note what it says about errors and requests."""
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = {"method": "", **json.loads(text)}
        if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(text.decode())
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(100)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip(f"there is no browser: none of {', '.join(NAMES)} is installed, and HWRL_TEST_BROWSER is not set")
    opened = Browser(executable, tmp_path / "profile")
    yield opened
    opened.close()
