"""``hwrl train`` with ranks that share each pack."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.train_run import Run, trained_prompts

pytestmark = pytest.mark.long(30)


def test_a_run_whose_ranks_share_each_pack_trains_on_every_prompt(start: Callable[..., Run]) -> None:
    run = start("train.ranks=2", "train.context_parallel=2", "train.steps=3", "algorithm.loss=decoupled")
    assert run.wait() == 0, run.output()
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert sorted(trained_prompts(run)) == list(range(3 * 4))
    # One share of the batch, and packs: a padded end is all that is not trained on.
    assert all(line["perf/imbalance"] == 1.0 and line["perf/padding_share"] < 0.2 for line in metrics)
    assert all(abs(line["actor/mismatch_kl"]) < 1e-3 for line in metrics[:1])
