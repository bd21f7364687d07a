"""hwrl bench train, on the tiny model: its rows, its count of operations, its reference, and the command."""

import json
import math
from pathlib import Path

import pytest
import torch

from hwrl import get_backend
from hwrl.cli import main
from hwrl.errors import ConfigError
from hwrl_bench.models import MODELS, ModelShape
from hwrl_bench.train import summarize
from hwrl_bench.train_process import ENGINE_WAYS, EngineWay, TrainSetup, TrainWorkload, measure
from hwrl_bench.train_references import ReferenceTraining
from hwrl_bench.train_rows import RaggedRows, even_rows, random_batch, step_flops
from hwrl_bench.ways import BenchPlan


@pytest.mark.parametrize(("rows", "tokens"), [(128, 148_104), (96, 116_302)])
def test_the_rows_are_those_of_the_published_measurements(rows: int, tokens: int) -> None:
    responses = RaggedRows(rows).responses()
    assert sum(responses) + 128 * rows == tokens and max(responses) == 3690 and min(responses) >= 16
    assert rows == 96 or sum(responses) // rows == 1029
    assert RaggedRows(rows).responses(seed=1) != responses


def test_rows_without_room_for_a_response_are_refused() -> None:
    with pytest.raises(ConfigError, match="use --longest 144 or more"):
        RaggedRows(3, mean=48, longest=128, prompt=128)


def test_the_references_rows_are_as_many_as_have_the_same_tokens_and_fill_every_pass() -> None:
    assert even_rows(RaggedRows(128), length=2048, multiple=8) == [1920] * 72
    assert even_rows(RaggedRows(96), length=2048, multiple=4) == [1920] * 56
    assert even_rows(RaggedRows(2), length=2048, multiple=8) == [1920] * 8, "at least one pass"


def test_the_operations_of_a_step_are_counted_as_by_hand() -> None:
    # A layer: queries and output 2 · 4 · 8, keys and values 2 · 4 · 4, the perceptron 3 · 4 · 10, norms 2 · 4 + 2 · 4.
    shape = ModelShape(100, 4, 10, 3, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    assert shape.layer_parameters == 3 * (64 + 32 + 120 + 16)
    # Two rows of 3 + 5 and 3 + 7 tokens; 12 response tokens; squares 64 + 100; 3 layers of 2 heads of 4.
    expected = 6 * 696 * 18 + 6 * 4 * 100 * 12 + 6 * 3 * 2 * 4 * 164
    assert step_flops(shape, [5, 7], prompt=3) == expected


def test_the_shape_counts_the_parameters_of_the_model(tmp_path: Path) -> None:
    from hwrl.models import build_model

    MODELS["tiny"].write(tmp_path)
    model = build_model(tmp_path, dtype=torch.float32)
    assert MODELS["tiny"].layer_parameters == sum(each.numel() for each in model.model.layers.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_batch_holds_random_tokens_in_rows_of_these_lengths() -> None:
    batch = random_batch([4, 2], prompt=3, vocabulary=50)
    assert batch.lengths().tolist() == [7, 5] and batch.trained_tokens == 6
    assert batch.tokens[1, 5:].tolist() == [0, 0] and batch.tokens[0].min() >= 3
    assert batch.behaviour_logprobs[0, 3].item() == pytest.approx(-math.log(50))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_reference_and_hwrl_agree_on_loss_and_gradients(tmp_path: Path, checkpointing: bool) -> None:
    MODELS["tiny"].write(tmp_path)
    backend, dtype = get_backend(), torch.float32
    batch = random_batch([20] * 6, prompt=5, vocabulary=512)
    workload = TrainWorkload("tiny", tmp_path, RaggedRows(6), "float32")
    engine = EngineWay(TrainSetup("hwrl", 64, 1), workload, backend, None)
    reference = ReferenceTraining(
        tmp_path,
        dtype=dtype,
        device=backend.device(),
        pass_tokens=50,
        learning_rate=1e-6,
        compiled=False,
        checkpointing=checkpointing,
    )
    for _ in range(2):  # the second step starts from the first one's weights
        expected, found = engine.train_batch(batch), reference.train_batch(batch)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


def test_a_round_lasts_as_long_as_its_slowest_rank() -> None:
    rank = {"tokens": [1000, 500, 1000], "flops": [6e12, 3e12, 6e12], "seconds": [2.0, 1.0, 1.0]}
    rank |= {"loss": 0.1, "warm_up_s": 5.0, "peak_nbytes": 7}
    other = {**rank, "seconds": [1.0, 4.0, 3.0], "peak_nbytes": 9, "warm_up_s": 6.0}
    row = summarize([rank, other], peak_flops=1e13)
    assert row["seconds"] == [2.0, 4.0, 3.0] and row["median_s"] == 3.0
    assert row["tokens_per_s"] == pytest.approx(1000 / 3) and row["mfu"] == pytest.approx(0.2)
    assert row["peak_nbytes"] == 9 and row["warm_up_s"] == 6.0 and row["ranks"] == 2
    assert summarize([rank], peak_flops=None)["mfu"] is None


def test_the_command_measures_hwrl_and_the_reference_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    ways = ["hwrl@128", "reference@256", "reference checkpointing"]
    words = ["bench", "train", "--ways", *ways, "--rounds", "2", "--micro-batch-tokens", "512", "--rows", "5"]
    assert main([*words, "--peak-tflops", "0.001", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert list(result["ways"]) == ["hwrl@128", "reference@256", "reference checkpointing@512"]
    hwrl, reference, _ = result["ways"].values()
    assert (
        [result["rows"]["tokens"]] * 2 == hwrl["tokens"] == [sum(RaggedRows(5, 48, 256, 16).responses()) + 5 * 16] * 2
    )
    assert reference["tokens"] == [256, 256] and reference["of_reference"] <= 1 and hwrl["of_reference"] > 0
    for row in result["ways"].values():
        assert row["median_s"] > 0 and row["warm_up_s"] > 0 and len(row["seconds"]) == 2 and math.isfinite(row["loss"])
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / 1e9) and row["peak_nbytes"] > 0
        rates = [tokens / seconds for tokens, seconds in zip(row["tokens"], row["seconds"], strict=True)]
        assert row["tokens_per_s"] == pytest.approx(sum(rates) / 2)
    assert hwrl["metrics"]["learning_rate"] > 0 and hwrl["recompilations"] == 0 and result["hardware"]["cores"] >= 1
    printed = capsys.readouterr().out
    assert printed.index("hwrl@128") < printed.index("reference@256") < printed.index("of ref.")


def test_devices_that_share_each_pack_share_the_rows(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "train", "--ways", "hwrl shared", "--ranks", "1", "2", "--rows", "1", "--mean", "200"]
    assert main([*words, "--dtype", "float32", "--rounds", "1", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    alone, shared = result["ways"].values()
    assert result["rows"]["longest"] == 256 * 200 // 48 and alone["tokens"] == [result["rows"]["tokens"]]
    assert shared["tokens"] == [alone["tokens"][0] / 2] and shared["flops"] == [alone["flops"][0] / 2]
    assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_each_step_may_have_rows_of_new_lengths(tmp_path: Path) -> None:
    MODELS["tiny"].write(tmp_path)
    rows = RaggedRows(3, 24, 128, 16)
    workload = TrainWorkload("tiny", tmp_path, rows, "float32", new_lengths=True)
    row = measure(0, "", TrainSetup("hwrl", 256, 1), workload, BenchPlan(("hwrl",), rounds=2, warm_up=1))
    assert row["tokens"] == [sum(rows.responses(seed)) + 3 * 16 for seed in (1, 2)]
    assert len(set(row["tokens"])) == 2


def test_a_way_that_fails_has_a_reason_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINE_WAYS, "hwrl", {"a_setting_to_come": 1})
    words = ["bench", "train", "--ways", "hwrl@128", "reference@128", "--rounds", "1", "--rows", "2"]
    assert main([*words, "--json", str(tmp_path / "bench.json")]) == 1
    ways = json.loads((tmp_path / "bench.json").read_text())["ways"]
    assert ways["hwrl@128"] == {"why_not": "this hwrl has no setting a_setting_to_come"}
    assert ways["reference@128"]["tokens_per_s"] > 0
    assert "hwrl@128: not measured: this hwrl has no setting a_setting_to_come" in capsys.readouterr().out


def test_two_ranks_have_a_batch_each_and_are_compared_with_one(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "train", "--ways", "hwrl@128", "--ranks", "1", "2", "--rounds", "1", "--rows", "4"]
    assert main([*words, "--json", str(target)]) == 0
    one, two = json.loads(target.read_text())["ways"].values()
    assert two["ranks"] == 2 and two["tokens"] == one["tokens"]
    assert two["of_one"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"]) and one["of_one"] is None
