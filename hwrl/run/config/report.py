"""The keys of the section ``report``."""

from __future__ import annotations

from pydantic import Field, model_validator

from hwrl.run.config.values import Function, Name, NotNegative, Options, Section


class ReportConfig(Section):
    """Samples, trackers and traces: what a run records about itself."""

    samples_per_step: NotNegative = 2
    """Trajectories of each step, chosen at random, that are written as text to ``samples.jsonl``; 0: none."""
    trackers: tuple[Function, ...] = ("tensorboard",)
    """Other places for metrics: names of plugins, ``file.py:function``; see [trackers](report.md#trackers)."""
    tracker_options: dict[Function, Options] = Field(default_factory=dict)
    """Settings of a tracker, by its name in ``trackers``. The tracker checks them."""
    trace_every: NotNegative = 0
    """Trace every n-th prompt, for [trackers of traces](watching.md#traces); 0: none."""
    run_name: Name | None = None
    """Name of the run in trackers; null: the last part of ``dir``."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> ReportConfig:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers={list(self.trackers)} has the same name twice")
        unused = sorted(self.tracker_options.keys() - set(self.trackers))
        if unused:
            raise ValueError(f"tracker_options are for trackers={list(self.trackers)}, not for {', '.join(unused)}")
        return self
