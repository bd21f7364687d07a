"""A process of a run refuses changed files. A resume accepts harmless changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hwrl.errors import ConfigError, HwrlError, InputChangedError
from hwrl.run.build import build_algorithm, build_engines, run_tokenizer
from hwrl.run.cluster.placement import ProcessDevices
from hwrl.run.config import Config, load_config, parse_config
from hwrl.run.demo import ALPHABET, write_demo, write_model
from hwrl.run.identity import EVAL, REWARD, TRAIN, RunInputs, identify_inputs
from hwrl.run.inputs import check_inputs
from hwrl.run.remote import ProcessSetup, RolloutActor, TrainActor

REWARD_FUNCTION = "def score(prompt, response, answer):\n    return 1.0\n"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "rewards.py").write_text(REWARD_FUNCTION)
    return load_config(write_demo(tmp_path, seed=1, prompts=16), [f"reward.function={tmp_path / 'rewards.py'}:score"])


def add_line(path: Path) -> None:
    with path.open("a") as file:
        file.write("\n")


def edit(name: str) -> Callable[[Config], None]:
    """Return a function that adds a line to the file ``name`` of the demo."""
    return lambda config: add_line(config.model.path.parent / name)


def delete(name: str) -> Callable[[Config], None]:
    return lambda config: (config.model.path.parent / name).unlink()


PROMPTS, EVALUATION, REWARD_FILE, TOKENIZER = "train.jsonl", "eval.jsonl", "rewards.py", "model/tokenizer.json"


def train_file(config: Config) -> Path:
    return config.model.path.parent / PROMPTS


def set_in_model(config: Config, **settings: Any) -> None:
    path = config.model.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_the_model(config: Config) -> None:
    set_in_model(config, rms_norm_eps=1e-3)


def spoil_the_weights(config: Config) -> None:
    """Change one byte, and restore size and modification time."""
    path = config.model.path / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_other_weights(config: Config) -> None:
    (config.model.path / "pytorch_model.bin").write_bytes(b"other weights")


def setup_of(config: Config, inputs: RunInputs) -> ProcessSetup:
    return ProcessSetup(config, inputs, "cpu", ProcessDevices(), "nowhere")


def set_up_trainer(config: Config, inputs: RunInputs) -> None:
    """Set up a trainer without a store to connect to."""
    TrainActor().set_up(setup_of(config, inputs), rank=0, incarnation=1, transport="host")


def set_up_replica(config: Config, inputs: RunInputs) -> None:
    """Set up a replica without a store to connect to."""
    RolloutActor().set_up(setup_of(config, inputs), name="replica-0", replica_id="replica-0#1", seed=1, ledger=None)


@pytest.mark.parametrize(
    ("change", "set_up", "name"),
    [
        (edit(PROMPTS), set_up_replica, "train.jsonl"),
        (delete(PROMPTS), set_up_replica, "train.jsonl"),
        (edit(REWARD_FILE), set_up_replica, "rewards.py"),
        (edit(TOKENIZER), set_up_replica, "tokenizer.json"),
        (delete(TOKENIZER), set_up_replica, "tokenizer.json"),
        (edit_the_model, set_up_replica, "config.json"),
        (edit_the_model, set_up_trainer, "config.json"),
        (spoil_the_weights, set_up_trainer, "model.safetensors"),
        (add_other_weights, set_up_trainer, "pytorch_model.bin"),
    ],
)
def test_a_process_that_finds_another_file_than_the_run_began_with_refuses(
    config: Config,
    change: Callable[[Config], None],
    set_up: Callable[[Config, RunInputs], None],
    name: str,
) -> None:
    inputs = identify_inputs(config)
    change(config)
    with pytest.raises(InputChangedError, match=f"{name} changed during the run") as caught:
        set_up(config, inputs)
    assert not isinstance(caught.value.__context__, HwrlError), "it comes before the process joins any other"


def test_evaluation_prompts_are_compared_as_they_are_read(config: Config) -> None:
    inputs = identify_inputs(config)
    assert inputs.read(EVAL) == train_file(config).with_name(EVALUATION).read_bytes()
    edit(EVALUATION)(config)
    with pytest.raises(InputChangedError, match=r"eval.jsonl changed"):
        inputs.read(EVAL)


def test_a_change_while_the_parts_are_built_is_found_and_is_the_error(config: Config) -> None:
    inputs = identify_inputs(config)
    with pytest.raises(InputChangedError, match=r"rewards.py changed"), inputs.unchanged("rollout"):
        edit(REWARD_FILE)(config)
        raise ValueError("what half a file leads to")


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("critic.path", {"algorithm": {"advantage": "gae"}}),
        ("algorithm.reference", {"algorithm": {"loss": "distill"}}),
    ],
)
def test_a_trainers_further_model_is_an_input_of_the_trainer_alone(
    config: Config, tmp_path: Path, key: str, others: dict[str, dict[str, str]]
) -> None:
    shutil.copytree(config.model.path, tmp_path / "further")
    section, name = key.split(".")
    changes = {**others, section: {**others.get(section, {}), name: str(tmp_path / "further")}}
    with_model = parse_config(config.model_dump(mode="json") | changes)
    inputs = identify_inputs(with_model)
    saved = {"inputs": inputs.digests()}
    assert identify_inputs(with_model).compare_with_checkpoint(saved) == []
    add_line(tmp_path / "further" / "model.safetensors")
    with inputs.unchanged("rollout"):
        pass
    with pytest.raises(InputChangedError, match=f"{key}/model.safetensors"), inputs.unchanged("trainer"):
        pass
    if key == "algorithm.reference":
        with pytest.raises(ConfigError, match="the weights of the reference model are not"):
            identify_inputs(with_model).compare_with_checkpoint(saved)


@pytest.mark.parametrize(
    ("alphabet", "why"),
    [
        ([*ALPHABET, "more"], None),  # further tokens harm nobody
        ([*ALPHABET[:3], *reversed(ALPHABET[3:])], "its tokenizer has other tokens"),
        (ALPHABET[:-1], "its vocabulary is smaller than the policy's"),
    ],
)
@pytest.mark.parametrize("words", [{"advantage": "gae"}, {"loss": "distill"}], ids=["critic", "teacher"])
def test_a_further_model_must_have_the_policys_tokens(
    config: Config, tmp_path: Path, words: dict[str, str], alphabet: list[str], why: str | None
) -> None:
    path = str(tmp_path / "further")
    write_model(Path(path), alphabet=alphabet, seed=0)
    further = {"critic": {"path": path}} if "advantage" in words else {}
    changes = {"algorithm": words if further else {**words, "reference": path}, **further}
    with_model = parse_config(config.model_dump(mode="json") | changes)
    algorithm = build_algorithm(with_model, identify_inputs(with_model))
    if why is None:
        build_engines(with_model, group=None, algorithm=algorithm).close()
        return
    with pytest.raises(ConfigError, match=f"cannot be used beside(.|\n)*{why}(.|\n)*same tokenizer"):
        build_engines(with_model, group=None, algorithm=algorithm)


def test_a_resume_keeps_the_weights_of_its_reference(config: Config) -> None:
    extra = {"inputs": identify_inputs(config).digests()}
    spoil_the_weights(config)
    near = parse_config(config.model_dump(mode="json") | {"algorithm": {"kl_coeff": 0.1}})
    with pytest.raises(ConfigError, match="the weights of the reference model are not"):
        identify_inputs(near).compare_with_checkpoint(extra)


def test_what_is_the_same_may_be_touched_copied_and_documented(config: Config) -> None:
    inputs = identify_inputs(config)
    for path in (train_file(config), config.model.path / "model.safetensors", config.model.path / "tokenizer.json"):
        path.write_bytes(path.read_bytes())
    set_in_model(config, _name_or_path="/elsewhere", transformers_version="0")
    (config.model.path / "README.md").write_text("a model")
    (config.model.path / ".cache").mkdir()
    for role in ("trainer", "rollout"):
        with inputs.unchanged(role):
            inputs.read(TRAIN)


def read_nbytes() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_an_unchanged_large_file_is_not_read_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_nbytes = (config.model.path / "model.safetensors").stat().st_size
    monkeypatch.setattr("hwrl.run.identity.LARGE_NBYTES", weights_nbytes - 1)
    inputs, before = identify_inputs(config), read_nbytes()
    with inputs.unchanged("trainer"):
        pass
    assert read_nbytes() - before < weights_nbytes
    spoil_the_weights(config)
    with pytest.raises(InputChangedError, match="safetensors changed"), inputs.unchanged("trainer"):
        pass


@pytest.mark.parametrize(
    ("change", "key"), [(edit(REWARD_FILE), REWARD), (edit(EVALUATION), EVAL), (spoil_the_weights, "model.path/model")]
)
def test_a_deliberate_resume_may_change_what_does_no_harm_and_says_so(
    config: Config, change: Callable[[Config], None], key: str
) -> None:
    extra = {"inputs": identify_inputs(config).digests()}
    assert identify_inputs(config).compare_with_checkpoint(extra) == []
    change(config)
    (sentence,) = identify_inputs(config).compare_with_checkpoint(extra)
    assert sentence.startswith(key) and "has changed since the checkpoint was saved" in sentence


def test_a_refusal_names_the_files_of_its_own_kind_only(config: Config) -> None:
    extra = {"inputs": identify_inputs(config).digests()}
    edit(REWARD_FILE)(config)
    edit(EVALUATION)(config)
    edit(PROMPTS)(config)
    with pytest.raises(ConfigError) as caught:
        identify_inputs(config).compare_with_checkpoint(extra)
    assert caught.value.what == f"{train_file(config)} does not hold the checkpoint's training data"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(PROMPTS), "does not hold the checkpoint's training data"),
        (edit_the_model, "the checkpoint does not belong to the model in"),
        (edit(TOKENIZER), "the tokenizer in .* is not the checkpoint's"),
    ],
)
def test_a_resume_with_other_prompts_model_or_tokenizer_is_refused(
    config: Config, change: Callable[[Config], None], message: str
) -> None:
    extra = {"inputs": identify_inputs(config).digests()}
    change(config)
    with pytest.raises(ConfigError, match=message):
        identify_inputs(config).compare_with_checkpoint(extra)


def with_sets(config: Config, *words: str) -> Config:
    directory = config.model.path.parent
    return load_config(directory / "config.yaml", [f"reward.function={directory / 'rewards.py'}:score", *words])


def test_every_data_set_is_identified_and_a_resume_refuses_another_mixture_or_curriculum(config: Config) -> None:
    path = train_file(config)
    curriculum = path.with_name("order.py")
    curriculum.write_text("def f(sets, seed):\n    return lambda number: (0, number % len(sets[0].prompts))\n")
    one, both = f"{{path: {path}, name: a}}", f"[{{path: {path}, name: a}}, {{path: {path}, name: b, weight: %s}}]"

    def inputs(*words: str) -> RunInputs:
        return identify_inputs(with_sets(config, *words))

    evals = f"data.eval={{x: {path}, y: {train_file(config).with_name(EVALUATION)}}}"
    mixed = inputs(f"data.train={both % 1}", evals)
    assert {"data.train/a", "data.train/b", "data.eval/x", "data.eval/y"} <= set(mixed.files)
    extra = {"inputs": mixed.digests()}
    assert inputs(f"data.train={both % 1}", evals).compare_with_checkpoint(extra) == []
    for other in (
        [f"data.train={both % 2}"],
        [f"data.train=[{one}]"],
        [f"data.train={both % 1}", "data.answer_key=prompt"],
        [f"data.train={both % 1}", f"data.curriculum={curriculum}:f"],
    ):
        with pytest.raises(ConfigError, match="training data"):
            inputs(*other, evals).compare_with_checkpoint(extra)
    assert len(inputs(f"data.train={both % 1}").compare_with_checkpoint(extra)) == 3, "evaluations may change"
    extra = {"inputs": inputs(f"data.curriculum={curriculum}:f").digests()}
    add_line(curriculum)
    with pytest.raises(ConfigError, match=r"order\.py does not hold(.|\n)*data.curriculum"):
        inputs(f"data.curriculum={curriculum}:f").compare_with_checkpoint(extra)


def test_a_directory_of_data_is_compared_by_all_its_files(config: Config) -> None:
    table = pa.Table.from_pylist([{"prompt": "21>", "answer": "12"}] * 4)
    directory = train_file(config).with_name("set")
    directory.mkdir()
    with pa.OSFile(str(directory / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (directory / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    inputs = identify_inputs(with_sets(config, f"data.train={directory}"))
    assert inputs.read_data(TRAIN) is None
    with inputs.unchanged("trainer"):
        pass
    add_line(directory / "state.json")
    with pytest.raises(InputChangedError, match="set changed during the run"):
        inputs.read_data(TRAIN)
    with pytest.raises(InputChangedError, match="set changed during the run"), inputs.unchanged("trainer"):
        pass


def test_a_chat_template_is_a_text_or_a_file_of_the_run(config: Config, tmp_path: Path) -> None:
    def tokenizer_of(template: str) -> str:
        changed = with_sets(config, f"data.chat_template='{template}'")
        inputs = identify_inputs(changed)
        text = run_tokenizer(changed, inputs).chat_template
        if changed.data.chat_template_file is not None:
            add_line(changed.data.chat_template_file)
            with pytest.raises(InputChangedError, match=r"template\.jinja changed during the run"):
                run_tokenizer(changed, inputs)
        return str(text)

    (tmp_path / "template.jinja").write_text("{{ messages }}")
    assert tokenizer_of(str(tmp_path / "template.jinja")) == "{{ messages }}"
    assert tokenizer_of("{{ messages[0] }}") == "{{ messages[0] }}"
    with pytest.raises(ConfigError, match=r"there is no file /no/file\.jinja\n  why: data\.chat_template names it"):
        check_inputs(with_sets(config, "data.chat_template=/no/file.jinja"))
    (tmp_path / "template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"template\.jinja is no chat template\n  why: .* can't decode"):
        check_inputs(with_sets(config, f"data.chat_template={tmp_path}/template.jinja"))


def test_the_file_of_a_workflows_tool_is_an_input_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool.py").write_text("def look(name: str) -> str:\n    return name\n")
    monkeypatch.chdir(tmp_path)
    tools = {"tools": ["tool.py:look"], "max_turns": 2}
    workflow = ["rollout.workflow=hwrl_workflows:tool_use", f"rollout.workflow_options={json.dumps(tools)}"]
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), workflow)
    assert config.rollout.workflow_options == {"tools": [f"{tmp_path}/tool.py:look"], "max_turns": 2}
    inputs = identify_inputs(config)
    with inputs.unchanged("rollout"), inputs.unchanged("trainer"):
        pass
    add_line(tmp_path / "tool.py")
    with inputs.unchanged("trainer"):
        pass
    with (
        pytest.raises(InputChangedError, match=r"tools\.0 names it, and its content has changed"),
        inputs.unchanged("rollout"),
    ):
        pass
    (tmp_path / "tool.py").write_text("def other(name: str) -> str:\n    return name\n")
    with pytest.raises(HwrlError, match="no function 'look'"):
        check_inputs(config)
    (tmp_path / "tool.py").unlink()
    with pytest.raises(HwrlError, match="there is no file"):
        check_inputs(config)
