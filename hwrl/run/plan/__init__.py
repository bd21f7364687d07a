"""Plan a run from its configuration: memory by cause, bytes on each link, and settings with which the run fits."""

from hwrl.run.plan.fit import check_rank, check_replica
from hwrl.run.plan.levers import suggest
from hwrl.run.plan.plan import Hardware, RunPlan, make_plan
from hwrl.run.plan.text import plan_as_json, plan_as_text

__all__ = [
    "Hardware",
    "RunPlan",
    "check_rank",
    "check_replica",
    "make_plan",
    "plan_as_json",
    "plan_as_text",
    "suggest",
]
