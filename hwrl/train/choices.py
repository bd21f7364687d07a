"""The names of advantages and losses in a configuration; docs/algorithms.md has their formulas and sources."""

from __future__ import annotations

from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
LossName = Literal["ppo_clip", "tis", "decoupled", "gspo", "cispo", "distill"]
CLIPPED_LOSSES = ("ppo_clip", "gspo", "cispo")
"""The losses that clip the ratio of the trained to the rollout policy."""
WEIGHTED_LOSSES = ("tis", "decoupled", "distill")
"""The losses with truncated importance weights, of tokens or of rows."""
AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How the losses of tokens become one number; ``seq`` means a row."""
KlEstimator = Literal["k1", "k2", "k3"]
ImportanceLevel = Literal["token", "sequence"]
RejectionMode = Literal["token_k1", "seq_sum_k1", "seq_mean_k1"]
"""The ratio to keep inside a band: a token's, the product over a row, or the geometric mean over a row."""
