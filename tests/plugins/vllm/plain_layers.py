"""vLLM's worker extension whose import lets linear layers of vLLM for CPUs keep their weights as they are.

Then vLLM's loaders only copy, as on devices.
"""

from __future__ import annotations

import vllm._custom_ops

vllm._custom_ops._supports_onednn = False


class PlainLayers:
    """Adds nothing to the worker."""
