"""vLLM's worker extension whose import lets linear layers of vLLM for CPUs keep their weights as they are.

Then vLLM's loaders only copy, as on devices.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is not None:  # pytest imports every module, to look for doctests
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


class PlainLayers:
    """Adds nothing to the worker."""
