"""The kit passes on the reference backend, and catches every fault of a backend that is faulty on purpose."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional

from hwrl.cli import conformance
from hwrl.discovery import Registry
from hwrl.errors import ConfigError, HwrlError
from hwrl.interfaces import Backend
from hwrl.testing import CheckResult, Kind, KitReport, Level, Subject
from hwrl.testing.conformance import run_kit
from hwrl.testing.contracts.transfers import in_daemon_thread
from hwrl.testing.limits import ran_out
from tests.support.faulty_packages import installed

FAULTS = {
    "module imports torch": "test_it_is_probed_without_torch",
    "info is another": "test_it_is_found_by_its_name",
    "probe imports torch": "test_it_is_probed_without_torch",
    "probe is slow": "test_its_probe_is_quick",
    "probe changes the environment": "test_it_is_probed_without_torch",
    "probe raises": "test_its_probe_denies_an_empty_machine",
    "probe says Yes": "test_its_probe_says_yes_where_it_runs",
    "probe gives no reason": "test_its_probe_says_yes_where_it_runs",
    "probe says yes to nothing": "test_its_probe_denies_an_empty_machine",
    "devices are dropped": "test_what_is_rendered_is_visible",
    "nothing is reserved": "test_devices_can_be_reserved",
    "no reason for a capability": "test_each_has_an_answer_with_a_reason",
    "require never raises": "test_require_agrees",
    "an unsupported abort does nothing": "test_what_is_unsupported_raises",
    "no device": "test_it_sees_a_device",
    "time runs backwards": "test_events_mark_time",
    "events measure seconds": "test_events_measure_milliseconds",
    "events measure microseconds": "test_events_measure_milliseconds",
    "it claims streams": "test_claimed_streams_run_beside_the_caller",
    "it claims varlen_attention": "test_claimed_varlen_attention_is_fused",
    "it claims compiled_training": "test_claimed_compiled_training_is_right_and_pays",
    "compiling raises": "test_claimed_compiled_training_is_right_and_pays",
    "compiled code is wrong": "test_claimed_compiled_training_is_right_and_pays",
    "a stream never ends": "test_streams_keep_order",
    "random state is not bytes": "test_random_numbers_repeat",
    "random state is not restored": "test_random_numbers_repeat",
    "every seed is the same": "test_a_seed_decides_random_numbers",
    "attention returns what was in memory": "test_attention_is_right and float32",
    "attention sees the future": "test_a_step_of_training_is_right and float32",
    "varlen attention sees its neighbours": "test_varlen_attention_is_right and float32 and ragged",
    "varlen attention sees the future": "test_varlen_attention_is_right and float32 and ragged",
    "varlen attention has a wrong gradient": "test_varlen_attention_is_right and float32 and ragged",
    "the peak is in TFLOP/s": "test_its_peak_is_a_number_or_unknown",
    "rms_norm ignores eps": "test_rms_norm_is_right and float32",
    "rms_norm has no gradient of its weight": "test_rms_norm_is_right and float32",
    "swiglu confuses its inputs": "test_swiglu_is_right and float32",
    "pinned memory is not host memory": "test_it_is_bytes_on_the_host",
    "pinned memory is device memory": "test_it_is_no_device_memory",
    "pinned memory is too small": "test_it_is_bytes_on_the_host",
    "pinned memory is not aligned": "test_it_is_aligned_for_every_dtype",
    "pinned memory is handed out twice": "test_two_pieces_do_not_overlap",
    "registered memory loses its bytes": "test_shared_memory_is_page_locked_until_it_is_unregistered",
    "freed memory is not freed": "test_its_device_memory_is_free",
    "cached memory is not given back": "test_freed_memory_is_given_back",
    "more is free than there is": "test_the_numbers_fit_each_other",
    "a broadcast does nothing": "test_collectives_are_right",
    "the library only reduces": "test_the_default_group_is_torchs",
    "it cannot average": "test_the_default_group_is_torchs",
    "abort does nothing": "test_abort_ends_what_is_blocked_or_is_refused",
    "a dead peer goes unnoticed": "test_a_killed_peer_is_noticed_and_replaced",
    "opened memory is a copy": "test_both_processes_see_the_same_bytes",
    "an exported part is the whole": "test_both_processes_see_the_same_bytes",
    "the exporter opens its own memory": "test_the_exporter_itself_is_refused",
    "a damaged handle is opened": "test_a_damaged_handle_is_refused",
    "anything is exported": "test_what_is_no_piece_of_memory_is_refused",
}
"""Each fault, and the check that must fail because of it."""
STUCK = {"probe is slow", "abort does nothing", "a dead peer goes unnoticed"}
"""Faults that show by a time limit alone."""
CLAIMED = {
    "it has streams": "test_claimed_streams_run_beside_the_caller",
    "it has varlen_attention": "test_claimed_varlen_attention_is_fused",
}
"""True claims, and their checks. The reference backend claims neither."""
IN_TWO_PROCESSES = {
    "test_collectives_are_right",
    "test_the_default_group_is_torchs",
    "test_abort_ends_what_is_blocked_or_is_refused",
    "test_a_killed_peer_is_noticed_and_replaced",
}
"""Checks of groups. The reference backend, the faulty one's twin, passes them below."""

BACKEND = Subject(Kind.BACKEND, "faulty")


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The faulty backend, as a distribution of its own that child processes find too."""
    with installed(Path(__file__).with_name("faulty_backend.py"), {"hwrl.backends": "faulty_backend"}, tmp_path):
        backend = Registry(env={"HWRL_BACKEND": "faulty"}).get_backend()
        faults = sys.modules["faulty_backend"].attention_over(functional.scaled_dot_product_attention)
        monkeypatch.setattr(functional, "scaled_dot_product_attention", faults)
        monkeypatch.setattr(torch, "compile", sys.modules["faulty_backend"].compiled_with(torch.compile))
        yield backend


def reference() -> Backend:
    return Registry(env={"HWRL_BACKEND": "cpu"}).get_backend()


@pytest.mark.parametrize("name", FAULTS)
def test_the_kit_catches(name: str, faulty: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", name)
    report = run_kit(BACKEND, backend=faulty, keyword=FAULTS[name])
    assert report.names("slow") if name in STUCK else report.failed
    assert not report.ok and report.reached is None, "a part of the checks reaches no level"


def test_the_good_twin_passes_the_checks_that_catch_faults(faulty: Backend) -> None:
    cheap = " or ".join(set(FAULTS.values()))
    report = run_kit(BACKEND, backend=faulty, level=Level.DEVICE, keyword=cheap)
    assert report.failed == []
    passed = {name.partition("::")[2].partition("[")[0] for name in report.names("passed")}
    caught = {check.partition(" ")[0] for check in FAULTS.values()}
    assert caught - passed == IN_TWO_PROCESSES | {check for check in caught if check.startswith("test_claimed")}


@pytest.mark.parametrize("claim", CLAIMED)
def test_a_true_claim_passes(claim: str, faulty: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", claim)
    assert run_kit(BACKEND, backend=faulty, keyword=CLAIMED[claim]).names("passed")


@pytest.mark.extended
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch's compiler needs one")
def test_a_compiler_that_pays_passes(faulty: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", "it has compiled_training")
    keyword = "test_claimed_compiled_training_is_right_and_pays"
    assert run_kit(BACKEND, backend=faulty, keyword=keyword).names("passed")


def test_a_check_whose_time_runs_out_is_not_called_wrong(
    faulty: Backend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keyword = "test_the_default_group_is_torchs"
    report = run_kit(BACKEND, backend=faulty, keyword=keyword, timeout_scale=1e-4)
    assert report.failed == [] and not report.ok
    assert report.names("slow") == [f"TestComm::{keyword}"]
    assert report.badge()["message"] == "too slow or stuck on cpu"
    shown = capfd.readouterr().out
    assert f"TOO SLOW OR STUCK TestComm::{keyword}" in shown and "--timeout-scale 4" in shown
    monkeypatch.setenv("HWRL_TIMEOUT_SCALE", "fast")
    with pytest.raises(ConfigError, match="HWRL_TIMEOUT_SCALE=fast is no factor"):
        run_kit(BACKEND, backend=faulty, keyword=keyword)


@pytest.mark.parametrize(
    ("said", "late"),
    [
        ("[unbound_buffer.cc:129] Timed out waiting 3ms for send operation to complete", True),
        ("wait timeout after 10ms, keys: /default_pg/0", True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("the two ranks did not meet within 3 ms", True),
        ("Connection closed by peer [127.0.0.1]:2341", False),
        ("timeout must be above 0", False),
    ],
)
def test_the_libraries_words_for_a_time_that_ran_out_are_known(said: str, late: bool) -> None:
    assert ran_out(RuntimeError(said)) is late


def test_a_device_without_collectives_conforms_on_groups_staged_through_the_host(
    faulty: Backend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HWRL_FAULT", "it has no collectives")
    report = run_kit(BACKEND, backend=faulty, keyword="TestComm or unsupported_raises or (bit_for_bit and device)")
    assert report.ok and not any(
        check.level is Level.COLLECTIVES for check in report.checks if check.outcome != "passed"
    )
    assert "10 passed" in capfd.readouterr().out


def test_a_device_whose_library_cannot_average_conforms_if_it_says_so(
    faulty: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HWRL_FAULT", "it says that it cannot average")
    assert run_kit(BACKEND, backend=faulty, keyword="test_the_default_group_is_torchs").names("passed")


def test_a_keyword_or_a_level_that_selects_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"nothing was checked(.|\n)*matches 'no_such'(.|\n)*like TestDeviceMap"):
        run_kit(Subject(Kind.BACKEND, "cpu"), backend=reference(), keyword="no_such")
    with pytest.raises(ConfigError, match=r"a transport has no checks up to the level compute"):
        run_kit(Subject(Kind.TRANSPORT, "host"), backend=reference(), level=Level.COMPUTE)


def test_options_of_pytest_in_the_environment_leave_no_check_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    report = run_kit(Subject(Kind.BACKEND, "cpu"), backend=reference(), level=Level.DEVICE, keyword="TestDeviceMap")
    assert report.names("passed")


@pytest.mark.long(30)
def test_the_command_checks_the_reference_backend_and_writes_its_report_and_badge(tmp_path: Path) -> None:
    """All levels, the short run included."""
    (tmp_path / "conftest.py").write_text("raise AssertionError('the kit must not read the conftest of this folder')")
    files = ["--json", "report.json", "--badge", "badge.svg"]
    ended = run_command("conformance", "cpu", *files, folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["kind"], report["name"], report["level"], report["reached"]) == ("backend", "cpu", "full", "full")
    assert report["ok"] and all(counts["passed"] for counts in report["levels"].values())
    assert list(report["levels"]) == [level.value for level in Level]
    badge = ElementTree.fromstring((tmp_path / "badge.svg").read_text())
    assert "".join(badge.itertext()) == f"hwrl {report['hwrl']} backendfull on cpu"


def test_the_command_refuses_what_it_cannot_do_before_any_check(tmp_path: Path) -> None:
    wrong = {
        ("conformance", "cup"): "did you mean 'cpu'?",
        ("conformance", "cpu", "--badge", "badge.png"): "FILE.svg",
        ("conformance", "cpu", "--badge", "badge.svg", "-k", "TestRun"): "earns no badge",
        ("conformance", "cpu", "-k", "no_such", "--json", "no/report.json"): "there is no folder no",
        ("conformance", "cpu", "--options", '{"room": 8}'): "takes no options",
        ("conformance", "embedded", "--options", '{"room": 8}'): "takes no options",
        ("conformance", "embedded", "--options", "room"): "JSON object",
        ("conformance", "cpu", "--kind", "transport"): "there is no transport 'cpu'",
        ("conformance", "cpu", "--timeout-scale", "0"): "HWRL_TIMEOUT_SCALE=0.0 is no factor",
    }
    for words, answer in wrong.items():
        with pytest.raises(HwrlError, match=re.escape(answer)):
            args = parser_of(*words).parse_args(words[1:])
            conformance.run(args)


def parser_of(*words: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    conformance.configure(parser)
    return parser


def run_command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    hwrl = str(Path(sysconfig.get_path("scripts")) / "hwrl")
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # several processes of the kit compute at once
    return subprocess.run(
        [hwrl, *words], env=env, cwd=folder, text=True, capture_output=True, timeout=2400, check=False
    )


# -- reports --------------------------------------------------------------------------------------------------------


def report_of(*outcomes: tuple[Level, str], level: Level = Level.FULL) -> KitReport:
    checks: Any = [CheckResult(f"Test{each}::test", each, outcome, "", 0.0) for each, outcome in outcomes]  # type: ignore[arg-type] # texts
    return KitReport(Subject(Kind.BACKEND, "acme"), reference(), level, tuple(checks))


def test_a_level_is_reached_if_something_passed_there_and_nothing_failed_up_to_it() -> None:
    good = [(level, "passed") for level in Level]
    assert report_of(*good).verdict() == "full"
    assert report_of(*good[:3], (Level.TRAIN, "failed"), *good[4:]).reached is Level.COLLECTIVES
    assert report_of((Level.COMPUTE, "failed"), *good[1:]).reached is None
    alone = report_of(*good[:2], (Level.COLLECTIVES, "skipped"), *good[3:])
    assert alone.verdict() == "full without collectives" and alone.badge()["color"] == "green"
    assert report_of(*good[:2], (Level.COLLECTIVES, "skipped"), level=Level.COLLECTIVES).reached is Level.DEVICE


def test_the_badge_of_a_failure_says_so(tmp_path: Path) -> None:
    report_of((Level.COMPUTE, "passed"), (Level.DEVICE, "failed")).write_badge(tmp_path / "badge.json")
    badge = json.loads((tmp_path / "badge.json").read_text())
    assert (badge["schemaVersion"], badge["message"], badge["color"]) == (1, "failing on cpu", "red")


def test_a_receive_without_an_end_does_not_keep_the_kit_alive() -> None:
    ended, before = threading.Event(), set(threading.enumerate())  # an earlier check may have left one
    waiting = in_daemon_thread(ended.wait)
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "hwrl-kit-receive")
    assert thread.daemon, "the interpreter would wait for it"
    ended.set()
    assert waiting.result(200.0)
