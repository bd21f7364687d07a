from __future__ import annotations

from tests.support.fsdp_training import model_directory

__all__ = ["model_directory"]  # a fixture
