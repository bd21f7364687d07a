"""From prompts to scored groups of responses: the prompt ledger, the rollouter, the embedded engine.

Each name is imported on first use. Processes without torch use the ledger and the checks of prompts and rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.rollout.chat import ChatTokens as ChatTokens
    from hwrl.rollout.chat import decode_text as decode_text
    from hwrl.rollout.checks import require_adapter as require_adapter
    from hwrl.rollout.checks import require_awake as require_awake
    from hwrl.rollout.checks import require_base as require_base
    from hwrl.rollout.checks import require_fit as require_fit
    from hwrl.rollout.checks import require_held as require_held
    from hwrl.rollout.checks import require_memory_tags as require_memory_tags
    from hwrl.rollout.checks import require_no_adapter as require_no_adapter
    from hwrl.rollout.checks import require_same_model as require_same_model
    from hwrl.rollout.checks import require_sleep as require_sleep
    from hwrl.rollout.checks import require_weights as require_weights
    from hwrl.rollout.data import DataKeys as DataKeys
    from hwrl.rollout.data import Prompt as Prompt
    from hwrl.rollout.data import Prompts as Prompts
    from hwrl.rollout.data import check_prompts as check_prompts
    from hwrl.rollout.embedded import EmbeddedEngine as EmbeddedEngine
    from hwrl.rollout.endpoint.session import Endpoint as Endpoint
    from hwrl.rollout.environments import TextEnvironment as TextEnvironment
    from hwrl.rollout.environments import environment as environment
    from hwrl.rollout.evaluator import EvaluatedPrompt as EvaluatedPrompt
    from hwrl.rollout.evaluator import Evaluation as Evaluation
    from hwrl.rollout.evaluator import Evaluator as Evaluator
    from hwrl.rollout.generation import GroupGenerator as GroupGenerator
    from hwrl.rollout.generation import NoRewards as NoRewards
    from hwrl.rollout.generation import PendingGroup as PendingGroup
    from hwrl.rollout.generation import SampleGenerator as SampleGenerator
    from hwrl.rollout.judge import Judge as Judge
    from hwrl.rollout.leases import LeaseQueue as LeaseQueue
    from hwrl.rollout.leases import LedgerClient as LedgerClient
    from hwrl.rollout.ledger import LedgerCounts as LedgerCounts
    from hwrl.rollout.ledger import PromptLease as PromptLease
    from hwrl.rollout.ledger import PromptLedger as PromptLedger
    from hwrl.rollout.ledger import UntrainedPrompts as UntrainedPrompts
    from hwrl.rollout.ledger import has_variance as has_variance
    from hwrl.rollout.memory import embedded_memory as embedded_memory
    from hwrl.rollout.memory import model_nbytes as model_nbytes
    from hwrl.rollout.model_link import INCARNATION as INCARNATION
    from hwrl.rollout.model_link import EngineModels as EngineModels
    from hwrl.rollout.model_link import ModelLink as ModelLink
    from hwrl.rollout.model_link import ReceivedModels as ReceivedModels
    from hwrl.rollout.model_link import RetryingReceiver as RetryingReceiver
    from hwrl.rollout.policy_client import PolicyClient as PolicyClient
    from hwrl.rollout.policy_client import TrajectoryBuilder as TrajectoryBuilder
    from hwrl.rollout.prompt_order import Curriculum as Curriculum
    from hwrl.rollout.prompt_order import PromptSet as PromptSet
    from hwrl.rollout.prompt_order import PromptStream as PromptStream
    from hwrl.rollout.prompt_order import mixture as mixture
    from hwrl.rollout.reward import Reward as Reward
    from hwrl.rollout.reward import RewardFunction as RewardFunction
    from hwrl.rollout.reward import Scores as Scores
    from hwrl.rollout.reward import load_reward as load_reward
    from hwrl.rollout.reward_workers import RewardWorkers as RewardWorkers
    from hwrl.rollout.reward_workers import Scorer as Scorer
    from hwrl.rollout.rollouter import LoopSettings as LoopSettings
    from hwrl.rollout.rollouter import Rollouter as Rollouter
    from hwrl.rollout.rows import HUB as HUB
    from hwrl.rollout.rows import digest_rows as digest_rows
    from hwrl.rollout.slots import cache_token_nbytes as cache_token_nbytes
    from hwrl.rollout.stops import StopFinder as StopFinder
    from hwrl.rollout.stops import stop_finder as stop_finder
    from hwrl.rollout.stops import text_decoder as text_decoder
    from hwrl.rollout.tool_calls import HERMES as HERMES
    from hwrl.rollout.tool_calls import parse_tool_calls as parse_tool_calls
    from hwrl.rollout.tools import tool_use as tool_use
    from hwrl.rollout.tracing import traced as traced
    from hwrl.rollout.weight_updater import AdapterUpdater as AdapterUpdater
    from hwrl.rollout.weight_updater import ModelUpdater as ModelUpdater
    from hwrl.rollout.weight_updater import WeightUpdater as WeightUpdater
    from hwrl.rollout.workflow import Workflow as Workflow
    from hwrl.rollout.workflow import WorkflowFactory as WorkflowFactory
    from hwrl.rollout.workflow import WorkflowGenerator as WorkflowGenerator
    from hwrl.rollout.workflow import WorkflowSettings as WorkflowSettings
    from hwrl.rollout.workflow import load_workflow as load_workflow
    from hwrl.rollout.workflow import single_turn as single_turn

_MODULE_OF = {
    "AdapterUpdater": "weight_updater",
    "ChatTokens": "chat",
    "Curriculum": "prompt_order",
    "DataKeys": "data",
    "EmbeddedEngine": "embedded",
    "Endpoint": "endpoint.session",
    "EngineModels": "model_link",
    "EvaluatedPrompt": "evaluator",
    "Evaluation": "evaluator",
    "Evaluator": "evaluator",
    "GroupGenerator": "generation",
    "HERMES": "tool_calls",
    "HUB": "rows",
    "INCARNATION": "model_link",
    "Judge": "judge",
    "LeaseQueue": "leases",
    "LedgerClient": "leases",
    "LedgerCounts": "ledger",
    "LoopSettings": "rollouter",
    "ModelLink": "model_link",
    "ModelUpdater": "weight_updater",
    "NoRewards": "generation",
    "PendingGroup": "generation",
    "PolicyClient": "policy_client",
    "Prompt": "data",
    "PromptLease": "ledger",
    "PromptLedger": "ledger",
    "PromptSet": "prompt_order",
    "PromptStream": "prompt_order",
    "ReceivedModels": "model_link",
    "RetryingReceiver": "model_link",
    "Reward": "reward",
    "RewardFunction": "reward",
    "RewardWorkers": "reward_workers",
    "Rollouter": "rollouter",
    "SampleGenerator": "generation",
    "Scorer": "reward_workers",
    "Scores": "reward",
    "StopFinder": "stops",
    "TextEnvironment": "environments",
    "TrajectoryBuilder": "policy_client",
    "UntrainedPrompts": "ledger",
    "WeightUpdater": "weight_updater",
    "Workflow": "workflow",
    "WorkflowFactory": "workflow",
    "WorkflowGenerator": "workflow",
    "WorkflowSettings": "workflow",
    "cache_token_nbytes": "slots",
    "check_prompts": "data",
    "decode_text": "chat",
    "digest_rows": "rows",
    "embedded_memory": "memory",
    "environment": "environments",
    "has_variance": "ledger",
    "Prompts": "data",
    "load_reward": "reward",
    "load_workflow": "workflow",
    "mixture": "prompt_order",
    "model_nbytes": "memory",
    "parse_tool_calls": "tool_calls",
    "require_adapter": "checks",
    "require_awake": "checks",
    "require_base": "checks",
    "require_fit": "checks",
    "require_held": "checks",
    "require_memory_tags": "checks",
    "require_no_adapter": "checks",
    "require_same_model": "checks",
    "require_sleep": "checks",
    "require_weights": "checks",
    "single_turn": "workflow",
    "stop_finder": "stops",
    "text_decoder": "stops",
    "tool_use": "tools",
    "traced": "tracing",
}

__all__ = [
    "HERMES",
    "HUB",
    "INCARNATION",
    "AdapterUpdater",
    "ChatTokens",
    "Curriculum",
    "DataKeys",
    "EmbeddedEngine",
    "Endpoint",
    "EngineModels",
    "EvaluatedPrompt",
    "Evaluation",
    "Evaluator",
    "GroupGenerator",
    "Judge",
    "LeaseQueue",
    "LedgerClient",
    "LedgerCounts",
    "LoopSettings",
    "ModelLink",
    "ModelUpdater",
    "NoRewards",
    "PendingGroup",
    "PolicyClient",
    "Prompt",
    "PromptLease",
    "PromptLedger",
    "PromptSet",
    "PromptStream",
    "Prompts",
    "ReceivedModels",
    "RetryingReceiver",
    "Reward",
    "RewardFunction",
    "RewardWorkers",
    "Rollouter",
    "SampleGenerator",
    "Scorer",
    "Scores",
    "StopFinder",
    "TextEnvironment",
    "TrajectoryBuilder",
    "UntrainedPrompts",
    "WeightUpdater",
    "Workflow",
    "WorkflowFactory",
    "WorkflowGenerator",
    "WorkflowSettings",
    "cache_token_nbytes",
    "check_prompts",
    "decode_text",
    "digest_rows",
    "embedded_memory",
    "environment",
    "has_variance",
    "load_reward",
    "load_workflow",
    "mixture",
    "model_nbytes",
    "parse_tool_calls",
    "require_adapter",
    "require_awake",
    "require_base",
    "require_fit",
    "require_held",
    "require_memory_tags",
    "require_no_adapter",
    "require_same_model",
    "require_sleep",
    "require_weights",
    "single_turn",
    "stop_finder",
    "text_decoder",
    "tool_use",
    "traced",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
