"""The comparison of what is sent under an adapter, on made-up histories."""

from __future__ import annotations

import pytest

from hwrl_bench.lora import WARM_UP_STEPS, compare, table
from hwrl_bench.training_runs import History


def history_of(*, step_s: float, base_nbytes: float) -> History:
    """Return a history whose first steps, which must not count, are ten times as long."""
    time_s, lines = 0.0, []
    for step in range(1, WARM_UP_STEPS + 6):
        time_s += step_s * (10 if step <= WARM_UP_STEPS else 1)
        line = {"step": float(step), "time_s": time_s, "timing_s/sync": step_s / 4, "rollout/update_s": step_s / 8}
        lines.append({**line, "sync/base_nbytes": base_nbytes, "sync/adapter_nbytes": 7.0})
    return lines


def test_the_saved_share_is_of_the_steps_after_the_first_ones() -> None:
    needed = [history_of(step_s=step_s, base_nbytes=0.0) for step_s in (0.5, 0.74, 9.0)]
    always = [history_of(step_s=1.0, base_nbytes=1000.0)] * 3
    result = compare({"needed": needed, "always": always})
    assert result["saved_share_of_step"] == pytest.approx(0.26)
    assert result["kinds"]["needed"] == pytest.approx(
        {"step_s": 0.74, "sync_s": 0.185, "update_s": 0.0925, "base_nbytes": 0.0, "adapter_nbytes": 7.0}
    )
    assert result["kinds"]["always"]["base_nbytes"] == 1000.0
    assert "a step takes 26.0% less" in table(result)
    assert {"peft", "torch", "ray"} <= result["versions"].keys()
