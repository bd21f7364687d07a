"""The trackers ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, ``prometheus``, ``opentelemetry``.

``docs/report.md`` and ``docs/watching.md`` describe them.

Each module is a plugin. Importing one does not import the tracker's library.
"""

__all__: list[str] = []
