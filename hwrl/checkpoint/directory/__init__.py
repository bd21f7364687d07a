"""The directory of a run's checkpoints: its lock, its steps, durable files."""
