"""Fixtures for whole runs: a demo in ``tmp_path``, and a function to start ``hwrl train`` on it."""

from tests.support.train_run import demo as demo
from tests.support.train_run import start as start
