"""The keys of what a run records about itself."""

from __future__ import annotations

from pydantic import Field, model_validator

from hwrl.run.config.section import Section
from hwrl.run.config.values import Function, Name, NotNegative, Options

TENSORBOARD = "tensorboard"
"""The tracker that needs no plugin."""


class ReportConfig(Section):
    """What a run records about itself, and where its metrics go."""

    samples_per_step: NotNegative = 2
    """Trajectories of each step, chosen at random, that ``samples.jsonl`` gets as text; 0: none."""
    trackers: tuple[Function, ...] = (TENSORBOARD,)
    """Where metrics go, too: ``tensorboard``, plugins, ``file.py:function``; see [trackers](report.md#trackers)."""
    tracker_options: dict[Function, Options] = Field(default_factory=dict)
    """By a name in ``trackers``: the tracker's own settings, which it checks."""
    trace_every: NotNegative = 0
    """Trace the prompts whose sequence number this divides, for [trackers of traces](watching.md#traces); 0: none."""
    run_name: Name | None = None
    """The run's name in trackers; null: the last part of ``dir``."""

    @model_validator(mode="after")
    def _trackers_differ(self) -> ReportConfig:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers={list(self.trackers)} has a name twice")
        return self

    @model_validator(mode="after")
    def _options_are_a_trackers(self) -> ReportConfig:
        unused = sorted(self.tracker_options.keys() - (set(self.trackers) - {TENSORBOARD}))
        if unused:
            raise ValueError(
                f"tracker_options are for names in trackers={list(self.trackers)}, not for {', '.join(unused)}"
            )
        return self
