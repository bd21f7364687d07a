"""The whole path beside a peer: its workload, its speeds, and a small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.cli import main
from hwrl.models import load_generation_config, load_model, load_tokenizer
from hwrl.run import Config, PlainView, Summary
from hwrl_bench.whole_path import make_workload, reward, table


def test_the_workload_is_a_random_model_whose_responses_end_by_chance(tmp_path: Path) -> None:
    workload = make_workload(tmp_path, model="tiny", steps=3, seed=1)
    model = load_model(tmp_path / "model", dtype=torch.float32)
    tokenizer = load_tokenizer(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    assert all(len(one) == workload.prompt_tokens for one in ids)
    ends = set(load_generation_config(tmp_path / "model").eos_token_id)
    assert len(ends) == workload.end_tokens
    assert not ends & set(np.concatenate(ids).tolist()), "a prompt never ends a response"
    with torch.no_grad():
        chances = model(torch.tensor(ids[:64])).logits[:, -1].softmax(-1)[:, sorted(ends)].sum(-1)
    assert chances.mean().item() == pytest.approx(workload.end_tokens / model.config.vocab_size, rel=0.2)


def test_the_reward_is_the_share_of_even_words() -> None:
    assert reward("", "t2 t4 t5 t7", "") == 0.5
    assert reward("", "", "") == 0.0


def _runs_in(seconds: list[float], tokens: list[float]) -> Any:
    """Return a stand-in for a training run that writes these totals of time and tokens, step by step."""

    def run_training(config: Config, view: PlainView) -> Summary:
        rows = [
            {"step": step, "time_s": time_s, "response/tokens_total": total, "timing_s/train": 1.0}
            for step, (time_s, total) in enumerate(zip(seconds, tokens, strict=True), start=1)
        ]
        config.dir.mkdir(parents=True)
        (config.dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Summary(finished=True, missed_goals=[], text="")

    return run_training


def test_the_speed_counts_from_the_end_of_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hwrl.run.run_training", _runs_in([50.0, 52.0, 54.0], [1000.0, 1800.0, 2600.0]))
    result = tmp_path / "path.json"
    assert main(["bench", "path", "--model", "tiny", "--steps", "3", "--peers", "trl", "--json", str(result)]) == 0
    ways = json.loads(result.read_text())["ways"]
    assert (ways["hwrl"]["tokens_per_s"], ways["hwrl"]["tokens_per_s_per_device"]) == (400.0, 200.0)
    assert ways["hwrl"]["step_s"] == 2.0
    assert ways["trl"]["why_not"] == "trl is not installed"
    assert "trl: not measured: trl is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["1", "0", "two"])
def test_a_run_without_a_counted_step_is_refused_at_once(
    steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hwrl.run.run_training", _runs_in([50.0], [1000.0]))
    with pytest.raises(SystemExit):
        main(["bench", "path", "--model", "tiny", "--steps", steps])
    assert f"--steps: it must be a whole number above 1, and is '{steps}'" in capsys.readouterr().err


def test_the_table_gives_the_ratio_to_a_measured_peer() -> None:
    row = {"tokens_per_s": 300.0, "tokens_per_s_per_device": 150.0, "step_s": 1.0}
    text = table({"hwrl": row, "trl": {**row, "tokens_per_s": 200.0}})
    assert "hwrl / trl: 1.50" in text
