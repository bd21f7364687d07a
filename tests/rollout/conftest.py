"""Fixtures for rollout: a function to start reward workers, which end with the test."""

from tests.support.started_rewards import start as start
