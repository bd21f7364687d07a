"""The kit's time limits: a limit ends a hang. On a slow or busy machine they are multiplied."""

from __future__ import annotations

import math
import os
import re
import subprocess

from hwrl.errors import CommTimeoutError, ConfigError, message_of

TIMEOUT_SCALE = "HWRL_TIMEOUT_SCALE"
"""The environment variable with the factor, for child processes too; ``hwrl conformance --timeout-scale`` sets it."""
_SAYS_SO = re.compile(r"\bwithin [\d.]+ m?s\b|timed out|timeout after|operation timeout|at the deadline", re.IGNORECASE)


def scaled(limit_s: float) -> float:
    """Return ``limit_s`` seconds for this machine. Raises ConfigError if the factor is no number above 0."""
    text = os.environ.get(TIMEOUT_SCALE) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ConfigError(f"{TIMEOUT_SCALE}={text} is no factor", why="it is not a number above 0", fix="set it like 4")
    return limit_s * factor


def ran_out(error: BaseException) -> bool:
    """Return whether a check failed because time ran out: the machine is too slow, or something is stuck."""
    timeouts = (TimeoutError, CommTimeoutError, subprocess.TimeoutExpired)
    return isinstance(error, timeouts) or _SAYS_SO.search(message_of(error)) is not None
