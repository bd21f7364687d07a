"""From prompts to scored groups of responses: the prompt ledger, the rollouter, the embedded engine.

Each name is imported on first use. Processes without torch use the ledger and the checks of prompts and rewards.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hwrl.rollout.checks import require_adapter as require_adapter
    from hwrl.rollout.checks import require_awake as require_awake
    from hwrl.rollout.checks import require_base as require_base
    from hwrl.rollout.checks import require_fit as require_fit
    from hwrl.rollout.checks import require_no_adapter as require_no_adapter
    from hwrl.rollout.checks import require_none_pending as require_none_pending
    from hwrl.rollout.checks import require_same_model as require_same_model
    from hwrl.rollout.checks import require_weights as require_weights
    from hwrl.rollout.data import Prompt as Prompt
    from hwrl.rollout.data import PromptStream as PromptStream
    from hwrl.rollout.data import check_prompts as check_prompts
    from hwrl.rollout.data import check_vocabulary as check_vocabulary
    from hwrl.rollout.data import load_prompts as load_prompts
    from hwrl.rollout.embedded import EmbeddedEngine as EmbeddedEngine
    from hwrl.rollout.evaluator import Evaluation as Evaluation
    from hwrl.rollout.evaluator import Evaluator as Evaluator
    from hwrl.rollout.leases import LedgerClient as LedgerClient
    from hwrl.rollout.ledger import LedgerCounts as LedgerCounts
    from hwrl.rollout.ledger import PromptLease as PromptLease
    from hwrl.rollout.ledger import PromptLedger as PromptLedger
    from hwrl.rollout.reward import Reward as Reward
    from hwrl.rollout.reward import load_reward as load_reward
    from hwrl.rollout.reward_workers import RewardWorkers as RewardWorkers
    from hwrl.rollout.reward_workers import Scores as Scores
    from hwrl.rollout.rollouter import LoopSettings as LoopSettings
    from hwrl.rollout.rollouter import Rollouter as Rollouter
    from hwrl.rollout.weight_updater import INCARNATION as INCARNATION
    from hwrl.rollout.weight_updater import AdapterUpdater as AdapterUpdater
    from hwrl.rollout.weight_updater import ModelUpdater as ModelUpdater
    from hwrl.rollout.weight_updater import RetryingReceiver as RetryingReceiver
    from hwrl.rollout.weight_updater import WeightUpdater as WeightUpdater

_HOME = {
    "AdapterUpdater": "hwrl.rollout.weight_updater",
    "EmbeddedEngine": "hwrl.rollout.embedded",
    "Evaluation": "hwrl.rollout.evaluator",
    "Evaluator": "hwrl.rollout.evaluator",
    "INCARNATION": "hwrl.rollout.weight_updater",
    "LedgerClient": "hwrl.rollout.leases",
    "LedgerCounts": "hwrl.rollout.ledger",
    "LoopSettings": "hwrl.rollout.rollouter",
    "ModelUpdater": "hwrl.rollout.weight_updater",
    "Prompt": "hwrl.rollout.data",
    "PromptLease": "hwrl.rollout.ledger",
    "PromptLedger": "hwrl.rollout.ledger",
    "PromptStream": "hwrl.rollout.data",
    "RetryingReceiver": "hwrl.rollout.weight_updater",
    "Reward": "hwrl.rollout.reward",
    "RewardWorkers": "hwrl.rollout.reward_workers",
    "Rollouter": "hwrl.rollout.rollouter",
    "Scores": "hwrl.rollout.reward_workers",
    "WeightUpdater": "hwrl.rollout.weight_updater",
    "check_prompts": "hwrl.rollout.data",
    "check_vocabulary": "hwrl.rollout.data",
    "load_prompts": "hwrl.rollout.data",
    "load_reward": "hwrl.rollout.reward",
    "require_adapter": "hwrl.rollout.checks",
    "require_awake": "hwrl.rollout.checks",
    "require_base": "hwrl.rollout.checks",
    "require_fit": "hwrl.rollout.checks",
    "require_no_adapter": "hwrl.rollout.checks",
    "require_none_pending": "hwrl.rollout.checks",
    "require_same_model": "hwrl.rollout.checks",
    "require_weights": "hwrl.rollout.checks",
}

__all__ = [
    "INCARNATION",
    "AdapterUpdater",
    "EmbeddedEngine",
    "Evaluation",
    "Evaluator",
    "LedgerClient",
    "LedgerCounts",
    "LoopSettings",
    "ModelUpdater",
    "Prompt",
    "PromptLease",
    "PromptLedger",
    "PromptStream",
    "RetryingReceiver",
    "Reward",
    "RewardWorkers",
    "Rollouter",
    "Scores",
    "WeightUpdater",
    "check_prompts",
    "check_vocabulary",
    "load_prompts",
    "load_reward",
    "require_adapter",
    "require_awake",
    "require_base",
    "require_fit",
    "require_no_adapter",
    "require_none_pending",
    "require_same_model",
    "require_weights",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
