"""Rollout: prompts to trajectories. The ledger of prompts, rollout engines, and the rollouter that drives one."""
