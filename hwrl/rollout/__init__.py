"""From prompts to scored groups of responses: the prompt ledger, the rollouter, the embedded engine.

Each name is imported on first use. Processes without torch use the ledger and the checks of prompts and rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_face

if TYPE_CHECKING:
    from hwrl.rollout.chat import ChatTokens as ChatTokens
    from hwrl.rollout.chat import Conversation as Conversation
    from hwrl.rollout.chat import TooLongError as TooLongError
    from hwrl.rollout.chat import arguments_object as arguments_object
    from hwrl.rollout.chat import content_text as content_text
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
    from hwrl.rollout.evaluator import EvaluatedPrompt as EvaluatedPrompt
    from hwrl.rollout.evaluator import Evaluation as Evaluation
    from hwrl.rollout.evaluator import Evaluator as Evaluator
    from hwrl.rollout.generation import GroupGenerator as GroupGenerator
    from hwrl.rollout.generation import NoRewards as NoRewards
    from hwrl.rollout.generation import PendingGroup as PendingGroup
    from hwrl.rollout.generation import SampleGenerator as SampleGenerator
    from hwrl.rollout.leases import LeaseQueue as LeaseQueue
    from hwrl.rollout.leases import LedgerClient as LedgerClient
    from hwrl.rollout.ledger import PromptLease as PromptLease
    from hwrl.rollout.ledger import PromptLedger as PromptLedger
    from hwrl.rollout.ledger import UntrainedPrompts as UntrainedPrompts
    from hwrl.rollout.ledger import has_variance as has_variance
    from hwrl.rollout.ledger_state import count_prompts as count_prompts
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
    from hwrl.rollout.reward import metrics_of as metrics_of
    from hwrl.rollout.reward_workers import RewardWorkers as RewardWorkers
    from hwrl.rollout.reward_workers import Scorer as Scorer
    from hwrl.rollout.rollouter import LoopSettings as LoopSettings
    from hwrl.rollout.rollouter import Rollouter as Rollouter
    from hwrl.rollout.rows import digest_rows as digest_rows
    from hwrl.rollout.slots import cache_token_nbytes as cache_token_nbytes
    from hwrl.rollout.stops import StopFinder as StopFinder
    from hwrl.rollout.stops import stop_finder as stop_finder
    from hwrl.rollout.stops import text_decoder as text_decoder
    from hwrl.rollout.tool_calls import HERMES as HERMES
    from hwrl.rollout.tool_calls import parse_tool_calls as parse_tool_calls
    from hwrl.rollout.tracing import traced as traced
    from hwrl.rollout.weight_updater import AdapterUpdater as AdapterUpdater
    from hwrl.rollout.weight_updater import WeightUpdater as WeightUpdater
    from hwrl.rollout.workflow import Workflow as Workflow
    from hwrl.rollout.workflow import WorkflowGenerator as WorkflowGenerator
    from hwrl.rollout.workflow import WorkflowSettings as WorkflowSettings
    from hwrl.rollout.workflow import load_workflow as load_workflow

__getattr__, __dir__, __all__ = lazy_face(__name__)
