from __future__ import annotations

from tests.support.fsdp_training import mixture_directory, model_directory

__all__ = ["mixture_directory", "model_directory"]  # fixtures
