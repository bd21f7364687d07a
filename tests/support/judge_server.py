"""An OpenAI-compatible server that fails, stalls and limits. ``python -m`` it with a file to write its port to."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_asked: Counter[str] = Counter()
_seen: dict[str, Any] = {"running": 0, "most": 0, "times": {}, "keys": []}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with _lock:
            self._send(200, _seen)

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        order = question.split(":")[0]
        with _lock:
            _asked[question] += 1
            first = _asked[question] == 1
            _seen["times"].setdefault(question, []).append(time.time())
            _seen["keys"].append(self.headers["Authorization"])
            _seen["running"] += 1
            _seen["most"] = max(_seen["most"], _seen["running"])
        try:
            self._answer(order, question, first=first)
        finally:
            with _lock:
                _seen["running"] -= 1

    def _answer(self, order: str, question: str, *, first: bool) -> None:
        if order == "stall" or (order == "stall once" and first):
            time.sleep(500.0 if order == "stall once" else 600.0)
        if order == "wait":
            time.sleep(0.2)
        if order == "fail" or (order == "fail once" and first):
            self._send(500, {"error": {"message": "out of order"}})
        elif order == "endless":
            self._send_for_ever(b" " * (1 << 16), pause_s=0.0)
        elif order == "drip":
            self._send_for_ever(b" ", pause_s=0.1)
        elif order in ("raw", "raw once") and (first or order == "raw"):
            self._send(200, question.partition(":")[2].encode("utf-8", "surrogatepass"))
        elif order == "nothing":
            self._send(int(question.partition(":")[2]), b"")
        elif order == "compressed":
            self._send(200, b"x", {"Content-Encoding": "gzip"})
        elif order == "odd limit" and first:
            self._send(429, b"", {"Retry-After": "\xe9"})
        elif order == "limit once" and first:
            self._send(429, {"error": {"message": "too many"}}, {"Retry-After": "2"})
        else:
            content = str(float(len(question)))
            self._send(
                200,
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "judge",
                    "choices": [
                        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
                    ],
                },
            )

    def _send(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client has gone
            self.close_connection = True

    def _send_for_ever(self, part: bytes, *, pause_s: float) -> None:
        self.close_connection = True
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
            while True:
                self.wfile.write(part)
                time.sleep(pause_s)
        except OSError:  # the client has gone
            pass

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 64
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Path(sys.argv[1]).write_text(str(server.server_port))
    server.serve_forever()
