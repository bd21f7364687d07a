"""The FLOP/s of dense matrix products, from CANN's own description of each NPU.

Its platform files give the number of a device's cube units, their clock rate, and their products per clock
(docs/npu.md).
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

_FILES = "*/data/platform_config"
_MEGA = 1e6


def of(name: str, env: Mapping[str, str]) -> float | None:
    """Return the FLOP/s in float16 and bfloat16 of the NPU ``name``, like "Ascend910B2"; None if CANN does not say."""
    home = env.get("ASCEND_HOME_PATH", "")
    files = sorted(Path(home).glob(f"{_FILES}/{name}.ini")) if home and name else []
    if not files:
        return None
    described = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        described.read(files[0], encoding="utf-8")
        soc, core = described["SoCInfo"], described["AICoreSpec"]
        cubes = int(soc.get("cube_core_cnt") or soc["ai_core_cnt"])
        multiplied = int(core["cube_m_size"]) * int(core["cube_k_size"]) * int(core["cube_n_size"])
        return cubes * multiplied * 2 * int(core["cube_freq"]) * _MEGA
    except (KeyError, ValueError, configparser.Error):
        return None
