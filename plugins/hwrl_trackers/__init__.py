"""Trackers: ``report.trackers`` takes ``wandb``, ``trackio`` and ``mlflow``; see ``docs/report.md``.

Each is a plugin of its own, a module in this package. Importing it imports no tracker.
"""
