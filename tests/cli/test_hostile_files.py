"""Files of runs and checkpoints that are damaged or forged at random, with seeds: a status and a message each time.

A forged checkpoint has right sizes and hashes: whoever writes into a directory can make them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager
from hwrl.checkpoint.durable import FileRecord
from hwrl.checkpoint.manifest import Manifest
from hwrl.cli import main
from hwrl.errors import ConfigError, DataError, HwrlError
from hwrl.output import printable
from hwrl.rollout import PromptLedger
from hwrl.rollout.ledger_state import count_prompts
from hwrl.run.config import RUN_HEADER, dump_config, load_config
from hwrl.run.report.run_report import RunReport
from hwrl_cpu import INFO, CpuBackend
from hwrl_report import build_page
from hwrl_simulate.calibration import calibrate, read_run
from hwrl_simulate.workload import Workload
from tests.support.run_files import event_of, sample_of, step_line, write_lines

SEEDS = [
    pytest.param(range(40), id="40 seeds"),
    pytest.param(range(40, 400), id="360 more", marks=pytest.mark.extended),
]
DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[Any] = [
    *(None, True, False, "", "x", "\x1b[2J\x9b\u202e", "\ud800", "a\0b", [], {}, [[]], {"": {}}, [None], -1, 0, 1, 2),
    *(2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**20, 10**400, 10**4000, 0.5, -0.0, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "9" * 5000, "../../x", "/dev/zero", "NaN", [[0, 10**11]], [[5, 1]]),
    *([[0, 0], [0, 0]], [[0, 1, 2]], {"step": 1}, ["x"] * 1000, "y" * 10**6, [1e400]),
]


def forged(tree: Any, chance: random.Random) -> Any:
    """Return a copy of ``tree`` with one to three of its values, at any depth, replaced, removed or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            for key in node if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    waiting.append(node[key])
        if not places:
            return deepcopy(chance.choice(VALUES))
        node, key = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[chance.choice(["x", "", "step", "\x1b[2J", "../x", "time_s"])] = deepcopy(chance.choice(VALUES))
            case 1:
                node.append(deepcopy(chance.choice(VALUES)))
            case _:
                node[key] = deepcopy(chance.choice(VALUES))
    return tree


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return ``data`` with some bytes changed, cut, repeated or put between."""
    noise = [b"", b"\0" * 1000, b"\xff\xfe", b"\x1b[2J", b"\n" * 100, DEEP.encode(), b'{"a":' * 5000, b"9" * 5000]
    noise += [b'{"step": 1, "step": 2}\n', b"NaN", b"[" * 5000, b"\xef\xbb\xbf", b'"' + b"z" * 10**6]
    begin, end = sorted(chance.choices(range(len(data) + 1), k=2))
    end = min(end, begin + chance.choice([0, 1, 10, 10**6]))
    return data[:begin] + chance.choice(noise) + data[end:] * chance.choice([1, 1, 1, 2])


@contextlib.contextmanager
def bounded(seed: int, *, undamaged_s: float) -> Iterator[None]:
    """Fail if the block takes very much longer than the same with undamaged files in this process."""
    began_s = time.perf_counter()
    yield
    took_s = time.perf_counter() - began_s
    assert took_s < 20 * undamaged_s + 30, f"seed {seed}: {took_s:.1f} s, and {undamaged_s:.1f} s undamaged"


def seconds_of(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def tell(words: list[str], capsys: pytest.CaptureFixture[str], *, seed: int, statuses: tuple[int, ...] = (0, 1)) -> str:
    """Run the command; return what it prints. Each failure has a message, and nothing steers the terminal."""
    status = main(words)
    shown = capsys.readouterr()
    assert status in statuses, f"seed {seed}"
    assert shown.out or shown.err.startswith("hwrl: "), f"seed {seed}: {shown.err!r}"
    assert shown.out + shown.err == printable(shown.out + shown.err), f"seed {seed}"
    return shown.out + shown.err


# -- run directories ------------------------------------------------------------------------------------------------


def make_run(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    write_lines(directory / "metrics.jsonl", [step_line(step, eval__reward=0.5) for step in range(1, 13)])
    events = [event_of(0, "start", "hwrl begins"), event_of(7, "trainer", "died"), event_of(12, "end", "done")]
    write_lines(directory / "events.jsonl", events)
    write_lines(directory / "samples.jsonl", [sample_of(step) for step in range(1, 13)])
    trained = [{"step": step, "sequence_numbers": [step], "failed": {str(step): "no"}} for step in range(1, 13)]
    write_lines(directory / "trained_prompts.jsonl", trained)
    (directory / "config.yaml").write_bytes(RUN_HEADER + b"train: {steps: 12}\n")


def spoil_run(directory: Path, chance: random.Random) -> None:
    path = directory / chance.choice(["metrics.jsonl", "events.jsonl", "samples.jsonl", "trained_prompts.jsonl"])
    if chance.random() < 0.3:
        path.write_bytes(damaged(path.read_bytes(), chance))
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(lines))
        lines[place] = forged(lines[place], chance)
    write_lines(path, lines)


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_page_is_written_of_any_run_directory(
    seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    make_run(run)
    undamaged_s = seconds_of(lambda: build_page(run))
    for seed in seeds:
        make_run(run)
        spoil_run(run, random.Random(seed))
        with bounded(seed, undamaged_s=undamaged_s):
            assert "wrote" in tell(["report", str(run)], capsys, seed=seed, statuses=(0,))


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_run_goes_on_in_any_run_directory_and_a_simulation_tells_what_is_wrong(seeds: range, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "c.yaml").write_text("dir: run\nmodel: {path: m}\ndata: {train: t.jsonl}\nreward: {function: 'm:f'}\n")
    config = load_config(tmp_path / "c.yaml")
    for seed in seeds[: len(seeds) // 4]:
        make_run(run)
        chance = random.Random(seed)
        for name in ("metrics.jsonl", "trained_prompts.jsonl", "samples.jsonl"):
            path = run / name
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            write_lines(path, [forged(line, chance) if chance.random() < 0.2 else line for line in lines])
        try:
            calibrate(config, read_run(run), Workload())
        except ConfigError as error:
            assert error.why and error.fix, f"seed {seed}"
        report = RunReport(run, log=lambda text: None, resume_step=12)
        report.close()


def test_the_largest_floats_are_shown_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    lines = [
        step_line(step, rollout__generate_s=float(value), rollout__replicas=1.0)
        for step, value in enumerate(["1e308", "inf", "-inf"], start=1)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert "wrote" in tell(["report", str(tmp_path)], capsys, seed=0, statuses=(0,))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "samples.jsonl", "trained_prompts.jsonl", "config.yaml"]
)
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_no_page_is_written_of_what_is_no_file_of_the_run(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("sesame\n")
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(secret if kind == "link" else "/dev/zero")
    shown = tell(["report", str(tmp_path)], capsys, seed=0, statuses=(1,))
    assert name in shown and ("symbolic link" in shown or "regular" in shown or "pipe" in shown)
    assert not (tmp_path / "report.html").exists()


def test_what_is_large_costs_no_more_than_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    undamaged_s = seconds_of(lambda: build_page(tmp_path))
    wide = {f"own/{'x' * 20}{number}": 1.0 for number in range(50_000)}
    write_lines(tmp_path / "metrics.jsonl", [{**step_line(1), **wide}])
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.seek((1 << 25) + 5)  # a hole: a line of zeros
        file.write(b"\n" + json.dumps(sample_of(99)).encode() + b"\n")
    with bounded(0, undamaged_s=undamaged_s):
        tell(["report", str(tmp_path)], capsys, seed=0, statuses=(0,))
    page = (tmp_path / "report.html").read_text()
    assert "Show 1000 of 50,00" in page and "step 99" in page and len(page) < 10_000_000


@pytest.mark.parametrize("out", ["/dev/null", "/dev/full", "{run}", "{run}/none/x.html", "."])
def test_a_page_goes_into_no_device_and_no_directory(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    out = out.format(run=tmp_path)
    before = os.stat("/dev/null").st_mode
    assert "cannot be written" in tell(["report", str(tmp_path), "--out", out], capsys, seed=0, statuses=(1,))
    assert os.stat("/dev/null").st_mode == before


# -- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with the checkpoint of one step."""
    home = tmp_path_factory.mktemp("saved") / "checkpoints"
    ledger = PromptLedger(groups_per_version=2, max_staleness=1, total_groups=20)
    with CheckpointManager(home, backend=CpuBackend(INFO)) as manager:
        state = {"model": {"weight": torch.ones(4, 3), "bias": torch.zeros(3)}, "count": 3}
        manager.save(1, state, weight_version=1, extra={"ledger": ledger.state_dict(), "step": 1})
    return home


def seal(checkpoint: Path) -> None:
    """Write sizes and hashes that agree with the files."""
    path = checkpoint / "MANIFEST.json"
    manifest = Manifest.from_bytes(path.read_bytes())
    files = {
        name: FileRecord(
            (checkpoint / name).stat().st_size, hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        )
        for name in manifest.files
    }
    path.write_bytes(replace(manifest, files=files).to_bytes())


def spoil_checkpoint(home: Path, chance: random.Random) -> None:
    checkpoint = home / "global_step_1"
    path = checkpoint / chance.choice(["MANIFEST.json", "extra.json", "extra.json", "layout.json", "layout.json"])
    text = path.read_text()
    if chance.random() < 0.2:
        path.write_bytes(damaged(text.encode(), chance))
        if path.name == "MANIFEST.json":
            return
    elif path.name == "MANIFEST.json":
        body = {name: value for name, value in json.loads(text).items() if name != "manifest_sha256"}
        body = forged(body, chance)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**body, "manifest_sha256": digest} if isinstance(body, dict) else body))
        return
    else:
        path.write_text(json.dumps(forged(json.loads(text), chance)))
    seal(checkpoint)


@pytest.mark.parametrize("seeds", SEEDS)
def test_any_checkpoint_is_listed_verified_and_refused_in_words(
    seeds: range, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(home: Path, *, seed: int, statuses: tuple[int, ...] = (0, 1)) -> None:
        assert home.name in tell(["checkpoints", "ls", str(home)], capsys, seed=seed, statuses=(0,))
        tell(["checkpoints", "ls", str(home), "--json"], capsys, seed=seed)
        tell(["checkpoints", "verify", str(home)], capsys, seed=seed, statuses=statuses)
        tell(["checkpoints", "export", str(home), str(home / "out"), f"--model={tmp_path}"], capsys, seed=seed)
        with contextlib.suppress(HwrlError), CheckpointManager(home, backend=CpuBackend(INFO)) as manager:
            manager.resume({"model": {"weight": torch.ones(4, 3), "bias": torch.zeros(3)}, "count": 3})
        tell(["checkpoints", "prune", str(home), "--keep=1"], capsys, seed=seed, statuses=statuses)

    undamaged_s = seconds_of(lambda: use(saved, seed=0, statuses=(0,)))
    for seed in seeds[: len(seeds) // 3]:
        home = tmp_path / f"home{seed}"
        shutil.copytree(saved, home)
        chance = random.Random(seed)
        spoil_checkpoint(home, chance)
        tracker = home / "latest_checkpointed_iteration.txt"
        tracker.write_bytes(damaged(tracker.read_bytes(), chance))
        (home / (".broken_" + chance.choice(["\x1b[2J", "\r", "\x9b"]))).mkdir()
        with bounded(seed, undamaged_s=undamaged_s):
            use(home, seed=seed)
        shutil.rmtree(home)


LEDGER = {
    "version": 3,
    "groups_per_version": 4,
    "trained": 12,
    "next": 22,
    "owed": [12, 13],
    "filtered": [[0, 4], [15, 15]],
    "failed": [[20, 21]],
    "untrained": {"filtered": [[15, 15]], "failed": [[21, "no"]]},
}


@pytest.mark.parametrize("seeds", SEEDS)
def test_any_ledger_is_loaded_or_refused_in_words(seeds: range) -> None:
    for seed in range(50 * seeds.start, 50 * seeds.stop):
        state = forged(LEDGER, random.Random(seed))
        ledger = PromptLedger(groups_per_version=4, max_staleness=1, total_groups=50)
        try:
            ledger.load_state_dict(state, incarnation=1)
        except HwrlError as error:
            assert error.why, f"seed {seed}"
        else:
            assert sum(count_prompts(state).values()) == state["next"], f"seed {seed}"


@pytest.mark.parametrize(
    "change",
    [
        {"filtered": [[0, 100_000_000_000]]},
        {"next": 10**18, "trained": 10**18 - 10},
        {"untrained": {"filtered": [[0, 2**33]], "failed": []}},
        {"trained": 13},
        {"owed": [12, 12]},
        {"owed": None},
        {"next": -1},
    ],
    ids=str,
)
def test_a_number_of_a_ledger_is_no_size_before_it_is_checked(
    change: dict[str, Any], saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {**LEDGER, **change}
    with pytest.raises(DataError, match="the saved state of the prompts cannot be used"):
        count_prompts(state)
    shutil.copytree(saved, tmp_path / "home")
    extra = tmp_path / "home" / "global_step_1" / "extra.json"
    content = json.loads(extra.read_text())
    content["all"]["ledger"] = state
    extra.write_text(json.dumps(content))
    seal(extra.parent)
    assert "its prompts are not known: " in tell(["checkpoints", "ls", str(tmp_path / "home")], capsys, seed=0)


def test_a_ledger_of_many_prompts_is_loaded_in_whole_ranges() -> None:
    state = {**LEDGER, "next": 50_000_022, "filtered": [[0, 4], [15, 15], [22, 50_000_021]]}
    ledger = PromptLedger(groups_per_version=4, max_staleness=1, total_groups=50)
    ledger.load_state_dict(state, incarnation=1)
    assert ledger.counts()["filtered"] == 50_000_006 and ledger.state_of(19) == "trained"
    assert (ledger.state_of(22), ledger.state_of(50_000_021), ledger.state_of(12)) == ("filtered", "filtered", "owed")
    assert ledger.state_dict()["filtered"] == state["filtered"]


# -- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", SEEDS)
def test_any_configuration_is_loaded_or_refused_in_words(
    seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    path = tmp_path / "c.yaml"
    minimal = {"dir": "run", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": {"function": "m:f"}}
    path.write_text(yaml.safe_dump(minimal))
    whole = yaml.safe_load(dump_config(load_config(path)))
    undamaged_s = seconds_of(partial(load_config, path))
    for seed in seeds:
        chance = random.Random(seed)
        if chance.random() < 0.3:
            path.write_bytes(damaged(yaml.safe_dump(whole).encode(), chance))
        else:
            path.write_text(json.dumps(forged(whole, chance)))
        with bounded(seed, undamaged_s=undamaged_s):
            shown = tell(["train", str(path), "--print-config"], capsys, seed=seed)
        assert "<class" not in shown, f"seed {seed}"
