"""Trackers: ``report.trackers`` takes ``wandb``, ``trackio``, ``mlflow``, ``prometheus`` and ``opentelemetry``.

``docs/report.md`` and ``docs/watching.md`` describe them.

Each is a plugin of its own, a module in this package. Importing it imports no tracker.
"""

__all__: list[str] = []
