"""The kit passes on the reference backend, and catches every fault of a backend that is faulty on purpose."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.nn import functional

from hwrl.discovery import Registry
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend
from hwrl.testing.conformance import run_kit

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
    "abort does nothing": "test_abort_ends_what_is_blocked_or_is_refused",
    "a dead peer goes unnoticed": "test_a_killed_peer_is_noticed_and_replaced",
    "opened memory is a copy": "test_both_processes_see_the_same_bytes",
    "an exported part is the whole": "test_both_processes_see_the_same_bytes",
    "the exporter opens its own memory": "test_the_exporter_itself_is_refused",
    "a damaged handle is opened": "test_a_damaged_handle_is_refused",
    "anything is exported": "test_what_is_no_piece_of_memory_is_refused",
}
"""Each fault, and the check that must fail because of it."""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The faulty backend, as a distribution of its own that child processes find too."""
    shutil.copy(Path(__file__).with_name("faulty_backend.py"), tmp_path)
    metadata = tmp_path / "faulty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hwrl.backends]\nfaulty = faulty_backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = Registry(env={"HWRL_BACKEND": "faulty"}).get_backend()
    faults = sys.modules["faulty_backend"].attention_over(functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", faults)
    yield backend
    sys.modules.pop("faulty_backend")


@pytest.mark.parametrize("name", FAULTS)
def test_the_kit_catches(name: str, faulty: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", name)
    status, failed = run_kit(faulty, keyword=FAULTS[name])
    assert status == pytest.ExitCode.TESTS_FAILED
    assert failed


def test_the_checks_that_catch_faults_pass_without_them(faulty: Backend) -> None:
    cheap = " or ".join(set(FAULTS.values()))
    assert run_kit(faulty, keyword=f"not TestComm and ({cheap})") == (pytest.ExitCode.OK, [])


def test_a_device_without_collectives_passes_with_skips_that_say_so(
    faulty: Backend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HWRL_FAULT", "it has no collectives")
    checks = "TestComm or unsupported_raises or bit_for_bit[device]"
    assert run_kit(faulty, keyword=checks) == (pytest.ExitCode.OK, [])
    assert "faulty lacks collectives: nobody wrote the library" in capfd.readouterr().out


def test_a_keyword_that_selects_nothing_is_an_error() -> None:
    backend = Registry(env={"HWRL_BACKEND": "cpu"}).get_backend()
    with pytest.raises(ConfigError, match=r"nothing was checked(.|\n)*matches 'no_such'(.|\n)*like TestDeviceMap"):
        run_kit(backend, keyword="no_such")
    assert run_kit(backend, keyword="TestDeviceMap")[0] == pytest.ExitCode.OK


def test_the_reference_backend_conforms() -> None:
    assert run_kit(Registry(env={"HWRL_BACKEND": "cpu"}).get_backend()) == (pytest.ExitCode.OK, [])


def test_the_command_checks_a_backend_by_name(tmp_path: Path) -> None:
    hwrl = str(Path(sysconfig.get_path("scripts")) / "hwrl")
    (tmp_path / "conftest.py").write_text("raise AssertionError('the kit must not read the conftest of this folder')")
    command = [hwrl, "conformance", "cpu", "-k", "TestDeviceMap or TestCapability"]
    ended = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    command = [hwrl, "conformance", "cup"]
    ended = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "did you mean 'cpu'?" in ended.stderr
