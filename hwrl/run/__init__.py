"""A whole run: configuration, the parts wired together, their processes, the report, and the demo."""
