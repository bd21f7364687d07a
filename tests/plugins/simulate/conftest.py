"""The demo as a fixture."""

from tests.support.train_run import demo as demo
