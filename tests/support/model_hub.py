"""A server with the part of the Hugging Face hub's API that a download needs, with the models of a directory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    models: ClassVar[Path]
    sent: ClassVar[Counter[str]]
    """How often each file was sent."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place = urlsplit(self.path).path.strip("/")
        if place.startswith("api/models/"):
            owner, name, what, *_ = place.removeprefix("api/models/").split("/")
            files = sorted(path for path in (self.models / owner / name).glob("**/*") if path.is_file())
            paths = [path.relative_to(self.models / owner / name).as_posix() for path in files]
            if not files:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif what == "tree":
                oids = [hashlib.sha1(path.read_bytes()).hexdigest() for path in files]
                rows = [
                    {"type": "file", "path": path, "size": file.stat().st_size, "oid": oid}
                    for path, file, oid in zip(paths, files, oids, strict=True)
                ]
                self._send(200, json.dumps(rows).encode())
            else:
                answer = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": path} for path in paths]}
                self._send(200, json.dumps(answer).encode())
            return
        owner, name, _, _, path = place.split("/", 4)
        content = (self.models / owner / name / path).read_bytes()
        if self.command == "GET":
            self.sent[path] += 1
        self._send(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serving(models: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve ``models``/OWNER/NAME during the block; gives the address, and how often each file was sent."""

    class OwnHandler(Handler):
        sent: ClassVar[Counter[str]] = Counter()

    OwnHandler.models = models
    with ThreadingHTTPServer(("127.0.0.1", 0), OwnHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", OwnHandler.sent
        finally:
            server.shutdown()
            thread.join()
