"""One process of a benchmark, and its exchange of values with the other processes."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwrl import Backend
    from hwrl.comm import Store

_TIMEOUT_S = 300.0  # the parent process ends a benchmark that takes longer


@dataclass
class BenchWorker:
    """One of ``size`` processes. They exchange JSON values over a store; each key is used once."""

    rank: int
    size: int
    store: Store
    backend: Backend
    _barriers: int = field(default=0, init=False)

    @classmethod
    def connect(cls, rank: int, size: int, address: str, backend: Backend) -> BenchWorker:
        """Return a worker with its own connection to the store at ``address``."""
        from hwrl.comm import connect_store

        return cls(rank, size, connect_store(address, timeout_s=_TIMEOUT_S), backend)

    def put(self, key: str, value: Any) -> None:
        """Give a JSON value to the other processes."""
        self.store.set(f"bench/{key}", json.dumps(value))

    def get(self, key: str) -> Any:
        """Block until a process put a value under ``key``; return the value."""
        return json.loads(self.store.get(f"bench/{key}"))

    def barrier(self) -> None:
        """Block until every process is here and its device is idle."""
        self.backend.synchronize()
        self._barriers += 1
        self.put(f"barrier/{self._barriers}/{self.rank}", True)
        for rank in range(self.size):
            self.get(f"barrier/{self._barriers}/{rank}")

    def free_endpoint(self) -> tuple[str, int]:
        """Return a host and a free port of this machine, the same in every process. Call it once."""
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.put("endpoint", probe.getsockname())
        host, port = self.get("endpoint")
        return host, port
