from __future__ import annotations

import os

# Every test runs on the reference backend, on every machine, unless the caller names another one.
os.environ.setdefault("HWRL_BACKEND", "cpu")
