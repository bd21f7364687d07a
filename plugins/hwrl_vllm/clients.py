"""Clients of vLLM's weight transfer: for a server, without vLLM in this process, and for an ``LLM`` in this process."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from hwrl.errors import EngineError

_FIX = "see the server's log"
_SHOWN_NBYTES = 1000
"""The bytes of a server's answer that an error shows."""
_KEY = re.compile(r"#[\w-]{20,}")  # the key in a store's address: a server's error may repeat the request


class ServerClient:
    """Calls the ``vllm serve`` at ``url``, which was started with VLLM_SERVER_DEV_MODE=1.

    A call blocks for at most ``timeout_s``. If it fails, it raises EngineError with the server's answer.

    Calls send the key of the trainer's store. Other machines can read plain http, so ``url`` must be https or an
    address of this machine, and otherwise this raises EngineError. ``plain_http`` accepts any url, for a network that
    only the run uses. Plain http uses no proxy, whatever ``http_proxy`` says.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, plain_http: bool = False) -> None:
        if not plain_http and not _is_private(url):
            raise EngineError(
                f"the key of the trainer's store would travel to {url} in the clear",
                why="the address is plain http to another machine, and whoever has the key is a member of the run",
                fix="use https or a tunnel to this machine, or pass plain_http=True in a network of your own",
            )
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        is_tls = urllib.parse.urlsplit(url).scheme == "https"  # a proxy cannot read it
        self._open = urllib.request.build_opener(*([] if is_tls else [urllib.request.ProxyHandler({})])).open

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._post("finish_weight_update", {})

    def pause(self, *, mode: str = "wait") -> None:
        """Begin no more requests, and empty the prefix cache. Running requests finish; with mode "keep" they stop."""
        self._post(f"pause?mode={mode}", {})

    def resume(self) -> None:
        """Begin requests again. Stopped requests continue, and their prompts are computed again."""
        self._post("resume", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            self._open(request, timeout=self._timeout_s).close()
        except urllib.error.HTTPError as exc:
            said = b""
            with exc, contextlib.suppress(OSError, http.client.HTTPException):  # the answer may break off
                said = exc.read(_SHOWN_NBYTES)
            answer = _KEY.sub("#…", said.decode(errors="replace"))
            fix = "see its log; a server without VLLM_SERVER_DEV_MODE=1 has no such route" if exc.code == 404 else _FIX
            raise EngineError(f"{self._url} refused {path}", why=f"{exc}: {answer}", fix=fix) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise EngineError(f"{self._url} did not answer {path}", why=f"{exc}", fix=_FIX) from exc


def _is_private(url: str) -> bool:
    """Return whether nobody but this machine and the server can read what is sent to ``url``."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a host name, which may be another machine's
        return False


class LocalClient:
    """Calls the workers of ``llm``, a ``vllm.LLM`` of this process."""

    def __init__(self, llm: Any) -> None:
        self._call = llm.collective_rpc

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._call("finish_weight_update")
