"""Clients of vLLM's weight transfer, where vLLM's own do not fit: without vLLM in the process, and for an LLM here."""

from __future__ import annotations

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
_KEY = re.compile(r"#[\w-]{20,}")  # of the address of a store: a server may repeat what it was sent


class ServerClient:
    """Calls the ``vllm serve`` at ``url`` (with VLLM_SERVER_DEV_MODE=1); a call may take ``timeout_s``.

    The first call sends the key of the trainer's store. So ``url`` is an address of this machine or https; other
    machines can read plain http, and ``plain_http`` accepts that, for a network that only the run uses. Raises
    EngineError, with the server's answer, if a call fails, and for plain http to another machine.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, plain_http: bool = False) -> None:
        if not plain_http and not _is_private(url):
            raise EngineError(
                f"the key of the trainer's store would travel to {url} in the clear",
                why="the address is plain http to another machine, and whoever has the key is a member of the run",
                fix="use https or a tunnel to this machine, or pass plain_http=True in a network of your own",
            )
        self._url, self._timeout_s = url.rstrip("/"), timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._post("finish_weight_update", {})

    def pause(self, *, mode: str = "wait") -> None:
        """Begin no requests, and empty the cache of prefixes; running requests finish, or with "keep" stop."""
        self._post(f"pause?mode={mode}", {})

    def resume(self) -> None:
        """Begin requests again; stopped ones go on, and compute their prompts anew."""
        self._post("resume", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=self._timeout_s).close()
        except urllib.error.HTTPError as exc:
            with exc:
                answer = _KEY.sub("#…", exc.read(_SHOWN_NBYTES).decode(errors="replace"))
            fix = "see its log; a server without VLLM_SERVER_DEV_MODE=1 has no such route" if exc.code == 404 else _FIX
            raise EngineError(f"{self._url} refused {path}", why=f"{exc}: {answer}", fix=fix) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise EngineError(f"{self._url} did not answer {path}", why=f"{exc}", fix=_FIX) from exc


def _is_private(url: str) -> bool:
    """Return whether only this machine or the server can read what is sent to ``url``."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a name
        return False


class LocalClient:
    """Calls the workers of ``llm``, vLLM's ``LLM`` in this process."""

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
