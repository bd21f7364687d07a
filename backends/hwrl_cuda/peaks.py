"""The FLOP/s of dense matrix products on known GPUs, by NVIDIA's data sheets and architecture white papers.

If a data sheet gives only the number with sparsity, we use half of it. GeForce numbers are with float32 accumulation.
"""

from __future__ import annotations

import re

_TERA = 1e12
# A device's name, and its TFLOP/s in bfloat16 (the same in float16) and in float32 without TF32.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"A[18]00[- ].+", 312, 19.5),
    (r"A10", 125, 31.2),
    (r"A30", 165, 10.3),
    (r"A40", 149.7, 37.4),
    (r"L4", 121, 30.3),
    (r"L40", 181, 90.5),
    (r"L40S", 362, 91.6),
    (r"H100 \d+GB HBM\d\w*|H800|GH200 .+", 989, 67),
    (r"H100 PCIe|H800 PCIe", 756, 51),
    (r"H100 NVL|H200 NVL", 835, 60),
    (r"H200", 989, 67),
    (r"H20(-3e)?", 148, 44),
    (r"B200", 2250, 75),
    (r"GB200", 2500, 80),
    (r"GeForce RTX 3090", 71, 35.6),
    (r"GeForce RTX 4090", 165.2, 82.6),
    (r"GeForce RTX 5090", 209.5, 104.8),
    (r"RTX 6000 Ada Generation", 364.2, 91.1),
)


def of(name: str, dtype: str) -> float | None:
    """Return the FLOP/s of the GPU that its driver calls ``name``, in ``dtype`` like "bfloat16"; None if unknown.

    A part of a divided GPU has another name than the whole, and no known number.
    """
    short = name.removeprefix("NVIDIA ")
    for pattern, half, single in _PEAKS:
        if re.fullmatch(pattern, short) and " MIG " not in short:
            number = {"bfloat16": half, "float16": half, "float32": single}.get(dtype)
            return None if number is None else number * _TERA
    return None
