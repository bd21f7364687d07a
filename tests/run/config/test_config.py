"""The configuration: typed, complete, and clear about mistakes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from hwrl.cli import main
from hwrl.errors import CheckpointError, ConfigError, DataError, EngineError, HwrlError
from hwrl.interfaces import LoraSettings
from hwrl.run.config import RUN_HEADER, dump_config, load_config
from hwrl.run.demo import write_demo
from hwrl.run.inputs import check_inputs, sampling_warning
from hwrl.run.run_directory import FIXED_KEYS, claimed_directory
from tests.support.run_config import MINIMAL, load, write_config


def test_overrides_are_applied_in_order_and_typed(tmp_path: Path) -> None:
    config = load(tmp_path, "train.steps=5", "train.steps=7", "resume=true", "optimizer.learning_rate=1e-3")
    assert (config.train.steps, config.resume, config.optimizer.learning_rate) == (7, True, 1e-3)


def test_what_is_printed_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = load(tmp_path, "goals={reward/mean: 0.5}")
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_every_mistake_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 mistakes") as caught:
        load_config(write_config(tmp_path, {**MINIMAL, "model": {}}), ["train.steps=0"])
    places = [line.strip().partition(":")[0] for line in caught.value.why.splitlines()]
    assert places == ["model.path", "train.steps"], "one line each"


FEW = ["train.batch_groups=1", "train.ranks=2", "rollout.n=7"]
SHARED = [*FEW, "train.context_parallel=2"]
FITTING = [
    [*FEW, "algorithm.mini_batches=3"],
    [*FEW, "algorithm.mini_batches=7", "train.engine=megatron"],
    [*SHARED, "algorithm.mini_batches=7"],
    ["rollout.engine=other", "rollout.tensor_parallel=2"],
    ["rollout.engine=other", "rollout.engine_options.tensor_parallel=2"],
    ["train.engine=other", "train.engine_options.tensor_parallel=2"],
    ["train.steps=5", "train.profile_steps=[2,5]"],
    ["rollout.n=1", "algorithm.advantage=gae", "critic.kl_coeff=0.1"],
    ["rollout.n=1", "algorithm.loss=distill", "algorithm.reference=teacher", "model.lora_rank=8"],
    ["algorithm.loss=losses.py:mine", "algorithm.reference=teacher"],
    ["rollout.n=1", "algorithm.advantage=reinforce_plus_plus"],
    ["rollout.n=1", "algorithm.advantage=advantages.py:of_batch"],
]


@pytest.mark.parametrize("words", FITTING, ids=" ".join)
def test_settings_that_fit_together_are_accepted(tmp_path: Path, words: list[str]) -> None:
    needs_one = {"critic.kl_coeff=0.1", "algorithm.loss=distill"} & {*words}
    assert load(tmp_path, *words).has_reference_copy == bool(needs_one)


REFUSED = {
    "train.steps": "not an override",
    "=3": "not an override",
    "dir.sub=3": "cannot be applied(.|\n)*set dir=… itself",
    "dir=[": "cannot be read",
    "reward=x.py:f": r"it is a section, not a value; did you mean reward\.function or ",
    "eval=5": r"it is a section, not a value; did you mean eval\.every_steps or ",
    "algorithm.clip_ratio_low=1": r"algorithm\.clip_ratio_low: Input should be less than 1",
    "rollout.max_running=4": "max_running=4 must be at least n=8",
    "model.lora_rank=8 train.engine=megatron": r"lora_rank=8 needs train\.engine=fsdp; megatron trains only whole",
    " ".join([*FEW, "algorithm.mini_batches=4"]): (
        r"the 7 responses of a step(.|\n)*train\.ranks=2 \* algorithm\.mini_batches=4"
    ),
    " ".join([*SHARED, "algorithm.mini_batches=8"]): (
        r"ranks=2 / train\.context_parallel=2 \* algorithm\.mini_batches=8"
    ),
    "train.ranks=3 train.context_parallel=2": "context_parallel=2 must divide ranks=3",
    "train.ranks=2 train.context_parallel=2 train.engine=megatron": (
        "context_parallel=2 is for engine=fsdp, not for megatron"
    ),
    "goals.eval/exact=0.5": r"goals: eval/exact cannot be reached without data\.eval",
    "eval.every_steps=5": r"eval\.every_steps=5 needs data\.eval",
    "eval.before_training=true": r"eval\.before_training=true needs data\.eval",
    "eval.n=4": "n=4 greedy responses",
    "rollout.sleep_level=2": r"also set free_cache_engine=true",
    "rollout.n=1": r"rollout\.n=1 nothing is learned",
    "rollout.tensor_parallel=2": r"tensor_parallel=2 is not possible: engine=embedded uses one device",
    "rollout.engine_options.tensor_parallel=2": "engine=embedded has no options",
    "train.engine_options.tensor_parallel=2": "engine=fsdp has no options",
    "checkpoint.staging=device": "staging=device is for saves in the background; also set async_save=true",
    "critic.lam=0.9": "critic has settings, but algorithm.advantage=grpo uses no critic",
    "algorithm.advantage=gae train.engine=megatron": "algorithm.advantage=gae needs train.engine=fsdp",
    "algorithm.kl_coeff=0.1 train.engine=megatron": "megatron does not support a reference model",
    "algorithm.loss=distill": r"loss=distill needs a teacher: set algorithm\.reference",
    "algorithm.loss=distill algorithm.reference=teacher train.engine=megatron": "megatron does not support a reference",
    "algorithm.reference=teacher": r"reference=\S+teacher has no effect; also set algorithm\.kl_coeff",
    "algorithm.advantage=gae rollout.n=1 algorithm.filter_groups=true": (
        "algorithm.filter_groups=true would filter every prompt"
    ),
    "algorithm.advantage=reinforce_plus_plus_baseline rollout.n=1": "rollout.n=1 nothing is learned",
    "algorithm.rollout_rs_threshold=1.5": "has no effect without rollout_rs",
    "algorithm.rollout_rs_threshold_lower=0.1": "has no effect without rollout_rs",
    "report.trackers=[tensorboard,tensorboard]": "has the same name twice",
    "report.tracker_options.wandb={}": "not for wandb",
    "report.trackers=[] report.tracker_options.tensorboard.a=1": "not for tensorboard",
    **{
        f"train.steps=5 train.profile_steps={steps}": "profile_steps"
        for steps in ("[0,1]", "[3,2]", "[2,6]", "[2]", "3")
    },
    "data.train=[a.jsonl,sub/a.jsonl]": r"data\.train: .*different names.* a, a",
}


@pytest.mark.parametrize(("words", "message"), REFUSED.items(), ids=[*REFUSED])
def test_settings_that_say_nothing_or_do_not_fit_together_are_refused(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *words.split(" "))


@pytest.mark.parametrize("content", ["a: [", "- 1\n", "just text", "[]", "false", "dir: \xe9"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"^{path}"):
        load_config(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml")


def test_paths_are_absolute_when_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, "reward.function=mine.py:f", "data.eval=sub/eval.jsonl")
    assert (config.dir, config.model.path) == (tmp_path / "run", tmp_path / "model")
    assert (config.data.train, config.data.eval) == (tmp_path / "train.jsonl", tmp_path / "sub" / "eval.jsonl")
    assert config.reward.function == f"{tmp_path / 'mine.py'}:f"
    assert load(tmp_path).reward.function == "m:f", "a module is no path"


def test_an_adapter_needs_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model.lora_rank=8", "model.target_modules=[q_proj]"]
    config = load_config(write_config(tmp_path, runnable(tmp_path)), words)
    check_inputs(config)
    assert config.model.lora == LoraSettings(rank=8, alpha=16.0, target_modules=("q_proj",))
    assert load(tmp_path).model.lora is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hwrl\[lora\]'"):
        check_inputs(config)


def test_a_key_under_a_section_that_the_file_made_a_value_is_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward has the value 'x\.py:f'(.|\n)*keys like reward\.function"):
        load_config(write_config(tmp_path, {**MINIMAL, "reward": "x.py:f"}), ["reward.attempts=2"])


def runnable(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(save({"w": np.ones(9)}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "mine.py").write_text("def f(prompt, response, answer): return 0.0\n")
    paths = {"model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "train.jsonl")}}
    others = {"reward": {"function": f"{tmp_path / 'mine.py'}:f"}, "report": {"trackers": []}}
    return {"dir": str(tmp_path / "run"), **paths, **others}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.path=/nowhere", "no model in /nowhere(.|\n)*not a directory"),
        ("model.path={tmp_path}", "no model in(.|\n)*config.json"),
        ("algorithm.kl_coeff=0.1 algorithm.reference={tmp_path}", r"no model in(.|\n)*algorithm\.reference names it"),
        ("data.train=/none.jsonl", "no file /none.jsonl(.|\n)*data.train names it"),
        ("data.eval=/none.jsonl", "no file /none.jsonl(.|\n)*data.eval names it"),
        ("data.train={tmp_path}/mine.py", "unknown kind"),
        ("data.train={tmp_path}/bad.jsonl", r"bad\.jsonl, line 2 is not a prompt"),
        ("data.eval={tmp_path}/empty.jsonl", r"empty\.jsonl holds no prompts"),
        ("reward.function={tmp_path}/mine.py:g", "no function 'g'"),
        ("train.engine=Fsdp", "did you mean 'fsdp'"),
        ("rollout.engine=embeded", "did you mean 'embedded'"),
    ],
)
def test_inputs_are_checked_before_anything_starts(tmp_path: Path, word: str, message: str) -> None:
    path = write_config(tmp_path, runnable(tmp_path))
    check_inputs(load_config(path))
    with pytest.raises(HwrlError, match=message):
        check_inputs(load_config(path, word.format(tmp_path=tmp_path).split()))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": b"x" * 99}, r"model\.safetensors: .*header"),
        ({"a.safetensors": None}, r"a\.safetensors: .*not fully covered"),
        ({INDEX: b'{"weight_map": {"w": "b.safetensors"}}'}, rf"b\.safetensors: {INDEX} names it"),
        ({INDEX: b"[]"}, f"{INDEX}: it is not an index"),
        ({INDEX: "a pipe"}, f"{INDEX}: it is not an index(.|\n)*regular"),
    ],
)
def test_a_model_with_damaged_files_is_refused_before_anything_starts(
    tmp_path: Path, files: dict[str, bytes | str | None], message: str
) -> None:
    path = write_config(tmp_path, runnable(tmp_path))
    check_inputs(load_config(path))
    whole = (tmp_path / "model" / "model.safetensors").read_bytes()
    for name, content in files.items():
        if isinstance(content, str):
            os.mkfifo(tmp_path / "model" / name)
        else:
            (tmp_path / "model" / name).write_bytes(whole[:-1] if content is None else content)
    with pytest.raises(DataError, match=f"is damaged or incomplete(.|\n)*{message}"):
        check_inputs(load_config(path))


def test_the_check_of_inputs_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text("class EngineArgs:\n    block_size: int = 1\n")
    path = write_config(tmp_path, runnable(tmp_path))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['ray'] = None\n"
        "from pathlib import Path\nfrom hwrl.run.config import load_config\nfrom hwrl.run.inputs import check_inputs\n"
        f"words = ['rollout.engine=vllm', 'rollout.engine_options={{block_size: 8}}']\n"
        f"sys.path.append({str(tmp_path)!r}); check_inputs(load_config(Path({str(path)!r}), words))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.engine=vllm"], r"vLLM is not installed(.|\n)*pip install hwrl\[vllm\]"),
        (["train.engine=megatron"], r"megatron-core is not installed"),
    ],
)
def test_an_engine_that_is_not_installed_is_told_of_at_once_unless_a_cluster_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = load_config(write_config(tmp_path, runnable(tmp_path)), words)
    with pytest.raises(EngineError, match=message):
        check_inputs(config)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    check_inputs(config)


def test_hwrl_train_checks_its_inputs_and_takes_a_reward_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = write_config(tmp_path, runnable(tmp_path))
    (tmp_path / "beside_the_run.py").write_text("")
    assert main(["train", str(path), "reward.function=beside_the_run:f"]) == 1
    assert "there is no function 'f' in beside_the_run" in capsys.readouterr().err
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    assert main(["train", str(path), "reward.function=quits:f"]) == 1
    assert "it ended the process: SystemExit(0)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_lead_is_as_large_as_the_threshold_and_no_larger(tmp_path: Path) -> None:
    groups = ["train.batch_groups=10", "async_training.trigger_parameter_sync_step=2"]
    leads = {
        "staleness_threshold=3": 60,
        "staleness_threshold=4 lead_versions=1.29": 25,
        "staleness_threshold=0 lead_versions=2": 0,
        "lead_versions=0": 0,
    }
    for words, lead in leads.items():
        overrides = [f"async_training.{word}" for word in words.split()]
        assert load(tmp_path, *groups, *overrides).lead_groups == lead
    exact = load(tmp_path, "train.batch_groups=100", "async_training.lead_versions=0.29")
    assert exact.lead_groups == 29, "the product of floats is 28.999999999999996"


@pytest.mark.parametrize("place", ["/proc/x", "config.yaml"])
def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path, place: str) -> None:
    path = write_config(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"cannot be used(.|\n)*dir="),
        claimed_directory(load_config(path, [f"dir={tmp_path / place}"])),
    ):
        pass


def test_a_second_run_in_a_directory_is_refused_and_changes_nothing_there(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    run = load_config(path, [f"dir={tmp_path / 'run'}"])
    with claimed_directory(run):
        before = (tmp_path / "run" / "config.yaml").read_text()
        for words in (["seed=5"], ["resume=true"]):
            with (
                pytest.raises(CheckpointError, match=rf"already has a writer(.|\n)*process {os.getpid()} on"),
                claimed_directory(load_config(path, [f"dir={tmp_path / 'run'}", *words])),
            ):
                pass
        assert (tmp_path / "run" / "config.yaml").read_text() == before
    with claimed_directory(run):
        pass


@pytest.mark.parametrize("name", ["config.yaml", "model", "metrics.jsonl"])
def test_nothing_that_hwrl_did_not_write_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path, {**MINIMAL, "dir": "."}).rename("mine.yaml")
    (tmp_path / name).write_bytes(b"# m\xefne")
    for words in ([], ["resume=true"]):
        with (
            pytest.raises(ConfigError, match=rf"would overwrite {name} in(.|\n)*dir="),
            claimed_directory(load_config(path, words)),
        ):
            pass
    assert (tmp_path / name).read_bytes() == b"# m\xefne"


def begun_run(tmp_path: Path) -> Path:
    """Return the directory of a run after one step."""
    with claimed_directory(load(tmp_path, f"dir={tmp_path / 'first'}")):
        (tmp_path / "first" / "metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path / "first"


def test_a_run_directory_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun_run(tmp_path).rename("second")
    config = load_config(Path("second/config.yaml"), ["resume=true"])
    assert config.dir == tmp_path / "second"
    with claimed_directory(config):
        pass
    assert not load_config(Path("second/config.yaml")).resume, "that is said each time"
    assert load_config(Path("second/config.yaml"), ["dir=third"]).dir == tmp_path / "third"
    assert not (tmp_path / "first").exists()


def test_a_run_without_its_configuration_is_still_a_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "global_step_7").mkdir(parents=True)
    (tmp_path / "run" / "model").mkdir()
    path, place = write_config(tmp_path), f"dir={tmp_path / 'run'}"
    with pytest.raises(ConfigError, match="already holds a run"), claimed_directory(load_config(path, [place])):
        pass
    with claimed_directory(load_config(path, [place, "resume=true"])):
        assert load_config(tmp_path / "run" / "config.yaml").dir == tmp_path / "run"


def test_a_run_is_not_overwritten_and_not_resumed_in_another_order_of_prompts(tmp_path: Path) -> None:
    own = begun_run(tmp_path)
    copy, place = write_config(tmp_path), f"dir={own}"
    with pytest.raises(ConfigError, match="already holds a run"), claimed_directory(load_config(copy, [place])):
        pass
    words = [place, "resume=true", "seed=7"]
    with pytest.raises(ConfigError, match="with a different seed"), claimed_directory(load_config(copy, words)):
        pass
    with claimed_directory(load_config(copy, words[:2])):
        pass


def test_a_damaged_account_is_still_a_run_and_a_damaged_configuration_is_an_error(tmp_path: Path) -> None:
    own = begun_run(tmp_path)
    (own / "metrics.jsonl").write_bytes(b"\0\0\xff\n")
    copy, place = write_config(tmp_path), f"dir={own}"
    with pytest.raises(ConfigError, match="already holds a run"), claimed_directory(load_config(copy, [place])):
        pass
    words = [place, "resume=true"]
    for damage in (
        b"seed: [\n",
        b"seed: 2026-99-99\n",
        b"seed: " + b"9" * 5000,
        b"seed: " + b"[" * 5000,
        b"seed: \xff\n",
    ):
        (own / "config.yaml").write_bytes(RUN_HEADER + damage)
        with pytest.raises(ConfigError, match=r"config.yaml is damaged"), claimed_directory(load_config(copy, words)):
            pass
    (own / "config.yaml").unlink()
    (own / "checkpoints" / "global_step_7").mkdir(parents=True)
    with claimed_directory(load_config(copy, words)):
        assert load_config(own / "config.yaml").seed == 0


def test_a_copy_of_a_runs_configuration_says_where_its_run_goes(tmp_path: Path) -> None:
    copy = (begun_run(tmp_path) / "config.yaml").rename(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match="dir: Field required"):
        load_config(copy)


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_a_resume_with_another_fixed_key_is_refused(tmp_path: Path, key: str) -> None:
    own = begun_run(tmp_path) / "config.yaml"
    with (
        pytest.raises(ConfigError, match=f"with a different {key}\n"),
        claimed_directory(load_config(own, ["resume=true", f'{key}="7"'])),
    ):
        pass


def test_a_resume_may_change_its_advantages_but_not_to_a_critic(tmp_path: Path) -> None:
    own = begun_run(tmp_path) / "config.yaml"
    with claimed_directory(load_config(own, ["resume=true", "algorithm.advantage=rloo"])):
        pass
    with (
        pytest.raises(ConfigError, match=r"with a different algorithm\.advantage\n"),
        claimed_directory(load_config(own, ["resume=true", "algorithm.advantage=gae"])),
    ):
        pass


def test_a_resume_may_find_model_and_data_elsewhere(tmp_path: Path) -> None:
    words = ["resume=true", "model.path=/elsewhere/model", "data.train=/elsewhere/train.jsonl"]
    with claimed_directory(load_config(begun_run(tmp_path) / "config.yaml", words)):
        pass


def test_the_page_says_what_a_resume_may_not_change() -> None:
    page = Path("docs/configuration.md").read_text(encoding="utf-8")
    said = page.partition("A resumed run may not change ")[2].partition("hold:")[0]
    assert sorted(re.findall("`(.*?)`", said)) == sorted([*FIXED_KEYS, "model.path", "data.train"])


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ([], None),
        (["rollout.top_p=0.8"], None),
        (["rollout.top_p=0.7"], r"^rollout\.top_p=0\.7: .* down to 0\.7; loss=ppo_clip clips it below 0\.8"),
        (["rollout.top_k=50"], r"^rollout\.top_k=50: .* down to 0; loss=ppo_clip clips it below 0\.8"),
        (["rollout.min_p=0.1", "algorithm.loss=tis"], None),
        (
            ["rollout.min_p=0.1", "algorithm.loss=tis", "algorithm.rollout_is=sequence"],
            "its product over a long response",
        ),
        (
            ["rollout.top_p=0.4", "algorithm.loss=decoupled", "algorithm.rollout_rs=token_k1"],
            "token_k1 rejects it below 0",
        ),
    ],
)
def test_a_loss_that_would_clip_fresh_tokens_of_filtered_sampling_is_named(
    tmp_path: Path, words: list[str], warning: str | None
) -> None:
    found = sampling_warning(load_config(write_demo(tmp_path, seed=1, prompts=4), words))
    assert (found is None) if warning is None else re.search(warning, found or "")
