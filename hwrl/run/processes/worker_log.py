"""Keep what a process of a run logs at WARNING or above. The next heartbeat brings it to the driver's log."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

_MOST, _MOST_CHARACTERS = 100, 500
_kept: deque[str] = deque(maxlen=_MOST)


def keep_warnings() -> None:
    """Keep the warnings that this process logs from now on, also those of libraries that print them themselves."""
    make = logging.getLogRecordFactory()

    def keep(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        if record.levelno >= logging.WARNING:
            try:
                text = record.getMessage()
            except Exception:  # noqa: BLE001 - the arguments may not fit the text, or their repr may raise
                text = str(record.msg)
            _kept.append(f"{record.name}: {' '.join(text.split())}"[:_MOST_CHARACTERS])
        return record

    logging.setLogRecordFactory(keep)


def take_warnings() -> tuple[str, ...]:
    """Return the kept warnings, at most the last 100, and keep them no longer. Any thread may call it."""
    return tuple(_kept.popleft() for _ in range(len(_kept)))
