"""The plan of a run: memory by device, links, suggestions that fit, and the page of docs made by the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwrl.cli import main
from hwrl.comm import serve_store, store_address
from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import MemoryInfo
from hwrl.run import load_config
from hwrl.run.cluster.placement import ProcessDevices
from hwrl.run.demo import write_demo
from hwrl.run.fit import check_rank, check_replica
from hwrl.run.identity import identify_inputs
from hwrl.run.remote import ProcessSetup
from hwrl.run.trainer import TrainerRank
from hwrl_cpu import INFO, CpuBackend
from hwrl_plan.command import size
from hwrl_plan.levers import suggest
from hwrl_plan.planning import Hardware, RunPlan, make_plan

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
MIB = 1 << 20
BIG = Hardware(4, 64 << 30)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    home = tmp_path_factory.mktemp("plan")
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(home / "model")
    (home / "config.yaml").write_text(
        f"dir: {home}/run\nmodel: {{path: {home}/model}}\ndata: {{train: {home}/t.jsonl}}\n"
        f'reward: {{function: "{home}/r.py:score"}}\n'
        "rollout: {max_new_tokens: 1024, max_running: 32}\ntrain: {micro_batch_tokens: 8192}\n"
    )
    return home / "config.yaml"


def nbytes_of(plan: RunPlan, kind: str, cause: str) -> int:
    (process,) = (one for one in plan.processes if one.name == kind)
    return sum(one.nbytes for one in process.causes if one.cause.startswith(cause))


def test_each_process_has_its_causes(config_file: Path) -> None:
    plan = make_plan(load_config(config_file), BIG)
    parameters = nbytes_of(plan, "trainer rank", "parameters")
    assert nbytes_of(plan, "trainer rank", "optimizer state") == 2 * parameters == 2 * 4 * 29_369_856
    assert nbytes_of(plan, "replica worker", "weights") == parameters, "float32"
    cache = 32 * 2048 * 2 * 8 * 4 * 64 * 4  # slots, tokens, keys and values, layers, heads, size, bytes
    assert nbytes_of(plan, "replica worker", "attention cache") == cache
    assert plan.fits and [one.count for one in plan.devices] == [1, 1]


def test_a_critic_and_a_reference_are_counted(config_file: Path) -> None:
    plain = make_plan(load_config(config_file), BIG)
    words = ["algorithm.advantage=gae", "algorithm.kl_coeff=0.1", "checkpoint.async_save=true"]
    plan = make_plan(load_config(config_file, words), BIG)
    parameters = nbytes_of(plan, "trainer rank", "parameters")
    critic = nbytes_of(plan, "trainer rank", "critic: parameters")
    assert critic == parameters + 4 * 512, "tied embeddings, and an output layer"
    assert nbytes_of(plan, "trainer rank", "critic: optimizer state") == 2 * critic
    assert nbytes_of(plan, "trainer rank", "reference: parameters") == parameters
    assert nbytes_of(plan, "trainer rank", "copy for a checkpoint") == 3 * (parameters + critic)
    assert plan.devices[0].nbytes - plain.devices[0].nbytes == pytest.approx(3 * critic, rel=0.01)


@pytest.mark.parametrize("lead", ["staleness_threshold=0", "lead_versions=0"])
def test_processes_on_one_device_share_its_memory_and_take_turns_if_they_sleep(config_file: Path, lead: str) -> None:
    apart = make_plan(load_config(config_file), BIG)
    hardware = replace(BIG, devices=1)
    (together,) = make_plan(load_config(config_file), hardware).devices
    assert together.nbytes == sum(one.nbytes for one in apart.devices)
    words = ["rollout.free_cache_engine=true", f"async_training.{lead}"]
    (in_turns,) = make_plan(load_config(config_file, words), hardware).devices
    assert in_turns.nbytes < together.nbytes and in_turns.phases != ("step", "step")
    words.append("async_training.trigger_parameter_sync_step=2")  # replicas work on the second step's prompts
    (overlapping,) = make_plan(load_config(config_file, words), hardware).devices
    assert overlapping.nbytes == together.nbytes


@pytest.mark.parametrize(
    ("words", "hardware", "hint"),
    [
        (["train.activation_checkpointing=false"], Hardware(2, 5 << 30), "train.activation_checkpointing"),
        (["train.micro_batch_tokens=2048"], Hardware(2, 2400 * MIB), "rollout.max_running"),
        ([], Hardware(2, 2600 * MIB), ""),
        (["rollout.max_running=8"], Hardware(4, 1900 * MIB), ""),
    ],
)
def test_suggestions_are_words_for_hwrl_train_and_fit(
    config_file: Path, words: list[str], hardware: Hardware, hint: str
) -> None:
    config = load_config(config_file, words)
    assert not make_plan(config, hardware).fits
    suggestions = suggest(config, hardware)
    assert suggestions
    for suggestion in suggestions:
        assert make_plan(load_config(config_file, [*words, *suggestion.overrides]), hardware).fits, suggestion.overrides
    assert any(hint in word for word in suggestions[0].overrides)


def test_what_no_setting_can_fix_has_no_suggestion(config_file: Path) -> None:
    assert suggest(load_config(config_file), Hardware(1, 64 * MIB)) == []


def test_too_few_devices_and_too_little_host_memory_do_not_fit(config_file: Path) -> None:
    (few,) = make_plan(load_config(config_file, ["train.ranks=4"]), Hardware(3, 64 << 30)).misfits
    assert "the run needs 4 devices" in few
    (split,) = make_plan(
        load_config(config_file, ["train.ranks=1", "rollout={engine: vllm, tensor_parallel: 3}"]),
        Hardware(4, 64 << 30, nodes=2),
    ).misfits
    assert "each replica needs 3 free devices on one node" in split
    (host,) = make_plan(load_config(config_file), replace(BIG, host_nbytes=1 << 30)).misfits
    assert "the host memory of a node needs 3.0 GiB and has 1.0 GiB" in host


def test_groups_with_large_buffers_are_counted(config_file: Path) -> None:
    """An NPU's communicator takes twice HCCL_BUFFSIZE: 400 MB by default."""
    words = ["train.ranks=4", "train.shard_ranks=2", "rollout.replicas=2"]
    config, large = load_config(config_file, words), replace(BIG, devices=8, group_nbytes=400 * MIB)
    plan, usual = make_plan(config, large), make_plan(config, replace(large, group_nbytes=0))
    assert "weights travel by device" in plan.placed, "it makes two groups"
    assert nbytes_of(plan, "trainer rank", "groups: buffers of 5") == 5 * 400 * MIB
    assert nbytes_of(plan, "replica worker", "groups: buffers of 2") == 2 * 400 * MIB
    assert nbytes_of(usual, "trainer rank", "groups") == 0
    assert plan.devices[0].nbytes - usual.devices[0].nbytes == 5 * 400 * MIB


def test_ranks_of_a_plugin_may_have_the_same_rows_and_keep_room_for_libraries(config_file: Path) -> None:
    words = ["train={ranks: 4, batch_groups: 2, engine: megatron, engine_options: {tensor_parallel: 4}}"]
    plan = make_plan(load_config(config_file, [*words, "train.micro_batch_tokens=65536"]), BIG)
    assert nbytes_of(plan, "trainer rank", "activations of 1 × 32,768 tokens") > 0, "16 rows of 2048 tokens"
    assert nbytes_of(plan, "trainer rank", "context and libraries") == 1 << 30
    assert not plan.unknown


def test_ranks_that_share_a_long_row_are_suggested(config_file: Path) -> None:
    words = ["rollout={n: 2, max_running: 2, max_new_tokens: 32768}", "train.ranks=4", "train.micro_batch_tokens=256"]
    config, hardware = (
        load_config(config_file, [*words, "train.activation_checkpointing=true"]),
        Hardware(5, 3500 * MIB),
    )
    assert not make_plan(config, hardware).fits
    assert ["train.context_parallel=2"] in [one.overrides for one in suggest(config, hardware)]


@pytest.mark.parametrize(
    ("words", "host", "device"),
    [
        ([], 12, 0),
        (["checkpoint.staging=device"], 0, 12),
        (["train.optimizer_offload=true"], 4, 0),
        (["train.param_offload=true", "train.optimizer_offload=true"], 0, 0),
        (["checkpoint.staging=device", "train.host_step=true"], 12, 0),
    ],
)
def test_a_checkpoint_copies_what_is_not_offloaded(config_file: Path, words: list[str], host: int, device: int) -> None:
    plan = make_plan(load_config(config_file, ["checkpoint.async_save=true", *words]), BIG)
    copies = {one.place: one.nbytes for one in plan.processes[0].causes if one.cause.startswith("copy for a")}
    assert copies == {place: 29_369_856 * each for place, each in {"host": host, "device": device}.items() if each}


def test_a_checkpoint_copies_an_adapter_alone(config_file: Path) -> None:
    pytest.importorskip("peft")
    plan = make_plan(load_config(config_file, ["checkpoint.async_save=true", "model.lora_rank=8"]), BIG)
    (copied,) = (one.nbytes for one in plan.processes[0].causes if one.cause.startswith("copy for a"))
    assert copied == 3 * nbytes_of(plan, "trainer rank", "gradients")


def test_links_count_the_bytes_of_an_update(config_file: Path) -> None:
    plan = make_plan(load_config(config_file, ["train.ranks=2", "model.dtype=bfloat16"]), BIG)
    gathered, sent = plan.links
    assert (gathered.nbytes, sent.nbytes) == (29_369_856, 2 * 29_369_856)
    assert sent.seconds(1e9) == pytest.approx(0.05874, abs=1e-4)
    pytest.importorskip("peft")
    adapter = make_plan(load_config(config_file, ["model.lora_rank=8"]), BIG).links
    assert adapter[0].nbytes < 29_369_856 / 10 and adapter[1].start


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_its_status_says_if_the_run_fits(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(config_file), "--devices", "2", "--json", "rollout.max_running=32", "--memory"]
    assert main([*words, "64GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert main([*words, "2GiB"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["misfits"] and said["suggestions"] and said["processes"][0]["causes"][0]["nbytes"] > 0


def test_nodes_of_different_sizes_are_refused(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_file), "--devices", "3", "--nodes", "2", "--memory", "64GiB"]) != 0
    assert "--devices=3 and --nodes=2 do not go together" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["80", "80GiB", " 1.5 TB ", ".5MiB"])
def test_sizes(text: str) -> None:
    assert size(text) == {"80": 80, "80GiB": 80 << 30, " 1.5 TB ": 1_500_000_000_000, ".5MiB": MIB // 2}[text]


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80gib", "0", "1e400"])
def test_no_sizes(text: str, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(config_file), "--devices", "1", f"--memory={text}"])
    assert "--memory" in capsys.readouterr().err


def test_no_device_of_the_backend_is_needed(config_file: Path) -> None:
    start = "import sys; from hwrl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "plan", str(config_file), "--devices", "2", "--memory", "64GiB"]
    environment = {**os.environ, "HWRL_BACKEND": "a-backend-of-the-cluster"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2000, check=False)
    assert done.returncode == 0 and "It fits." in done.stdout, done.stderr


# -- hwrl train -----------------------------------------------------------------------------------------------------


class Small(CpuBackend):
    """A host of so many bytes."""

    def __init__(self, total: int) -> None:
        super().__init__(INFO)
        self._total = total

    def memory_info(self) -> MemoryInfo:
        return replace(super().memory_info(), total_nbytes=self._total)


def test_a_run_that_surely_cannot_fit_is_refused_with_the_words_of_the_plan(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, state = load_config(config_file, ["rollout.max_running=8"]), 16 * 29_369_856
    check_rank(config, Small(2 << 30), rank=0, alone=True)
    check_rank(config, Small(state - 1), rank=1, alone=True)  # the first rank counts for all
    check_rank(config, Small(state), rank=0, alone=False)
    with pytest.raises(DeviceMemoryError, match=r"1 trainer rank\(s\) with 1 replica\(s\) needs .* attention cache"):
        check_rank(config, Small(state + MIB), rank=0, alone=True)
    with pytest.raises(DeviceMemoryError) as caught:
        check_rank(config, Small(state - 1), rank=0, alone=False)
    assert "a trainer rank needs 0.4 GiB and has 0.4 GiB: at least parameters 0.1 GiB" in caught.value.why
    command = re.search("`hwrl (plan .*)`", caught.value.fix)
    assert command is not None
    assert main(command[1].replace("CONFIG", str(config_file)).split()) == 1
    assert "It does not fit" in capsys.readouterr().out
    words = ["rollout.max_running=8", "rollout.free_cache_engine=true", "async_training.staleness_threshold=0"]
    in_turns = load_config(config_file, words)
    check_rank(in_turns, Small(state + MIB), rank=0, alone=True)  # they never need it all at a time
    check_replica(config, Small(1))  # the host is the device: the first rank has counted it


def test_a_trainer_rank_refuses_a_model_that_surely_does_not_fit_before_it_reads_weights(tmp_path: Path) -> None:
    config = load_config(write_demo(tmp_path, seed=1, prompts=16))
    path = tmp_path / "model" / "config.json"
    large: dict[str, Any] = {"hidden_size": 1 << 13, "intermediate_size": 1 << 16, "num_hidden_layers": 100}
    large["layer_types"] = ["full_attention"] * 100
    path.write_text(json.dumps(json.loads(path.read_text()) | large))
    store = serve_store("127.0.0.1")
    with pytest.raises(DeviceMemoryError, match="the run does not fit"):
        setup = ProcessSetup(config, identify_inputs(config), "cpu", ProcessDevices(), store_address(store))
        TrainerRank(setup, rank=0, incarnation=0, transport="device")


# -- the page -------------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("title", sections())
def test_the_page_shows_what_the_command_prints(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, text in re.findall(r"^`([\w./-]*/config\.json)`:\n\n```json\n(.*?)```", PAGE.read_text(), re.M | re.S):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    body = sections()[title]
    configuration, command, output = split(body)
    Path("config.yaml").write_text(configuration)
    assert main(["train", "config.yaml", "--print-config"]) == 0
    capsys.readouterr()
    main(command.split()[1:])
    assert capsys.readouterr().out.strip() == output.strip()


def split(body: str) -> tuple[str, str, str]:
    found: Any = re.search(r"```yaml\n(.*?)```\n\n```sh\n(.*?)```\n(.*)", body, re.S)
    return found[1], found[2], found[3]
