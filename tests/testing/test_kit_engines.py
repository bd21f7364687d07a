"""The kit catches every fault of engines and transports, and their good twins pass the same checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hwrl
from hwrl.testing import KitReport, Level, Subject, find_subject
from hwrl.testing.conformance import run_kit
from hwrl.testing.levels import Kind
from tests.support.faulty_packages import installed

HERE = Path(__file__).parent
TRAIN_FAULTS = {
    "the temperature is ignored": "test_logprobs_are_the_models",
    "prompts are scored": "test_logprobs_are_the_models",
    "each micro-batch has a mean of its own": "test_two_steps_are_those_of_adamw",
    "row weights are ignored": "test_two_steps_are_those_of_adamw",
    "warm-up is ignored": "test_two_steps_are_those_of_adamw",
    "it steps on a gradient that is not finite": "test_a_gradient_that_is_not_finite_changes_nothing",
    "an offload loses the optimizer's state": "test_offloading_changes_no_step",
    "bytes are reported that did not move": "test_without_offload_nothing_moves",
    "all ranks take the first share": "test_two_ranks_take_the_steps_of_one",
    "ranks train alone": "test_two_ranks_take_the_steps_of_one",
    "weights have other names": "test_its_weights_are_those_of_the_files",
    "weights have another shape": "test_its_weights_are_those_of_the_files",
    "metadata is of another dtype": "test_its_weights_are_those_of_the_files",
    "the optimizer's state is not restored": "test_a_restored_engine_continues",
    "an export has the starting weights": "test_an_export_is_a_model",
    "it goes uphill": "test_it_learns",
}
ROLLOUT_FAULTS = {
    "greedy requests are sampled": "test_greedy_tokens_are_the_models",
    "the temperature is 1": "test_logprobs_are_at_the_temperature",
    "all requests share a seed": "test_sampling_follows_the_distribution",
    "filters are ignored": "test_filters_shape_the_distribution",
    "a second sleep frees again": "test_it_generates_the_same_after_a_sleep",
    "dropped weights keep their version": "test_it_generates_the_same_after_a_sleep",
    "weights are lost in the sleep": "test_it_generates_the_same_after_a_sleep",
    "it sleeps in the middle of requests": "test_it_does_not_sleep_with_requests",
    "any level is taken": "test_it_refuses_what_is_no_level_and_no_tag",
    "other tags wake nothing, without an error": "test_it_refuses_what_is_no_level_and_no_tag",
    "a received version is not stamped": "test_a_version_arrives_from_a_link",
    "the end token is cut off": "test_a_response_ends_as_asked",
    "stop tokens are ignored": "test_a_response_ends_as_asked",
    "requests come back twice": "test_each_request_comes_back_once",
    "capacity never falls": "test_each_request_comes_back_once",
    "abort forgets what it dropped": "test_abort_drops_every_request",
    "a request without room is cut": "test_a_request_without_room_is_refused",
    "all tokens have the newest version": "test_each_token_has_its_version",
    "incomplete weights are taken": "test_incomplete_weights_are_refused",
    "loaded weights are not copied": "test_loaded_weights_are_copied",
}
TRANSPORT_FAULTS = {
    "bytes change after their sums": "test_weights_arrive_bit_for_bit",
    "a second version is not sent": "test_versions_follow_each_other",
    "a failing source is hidden": "test_a_failing_source_leaves_the_old_version",
    "a receiver trusts its own sums": "test_a_damaged_bucket_never_commits",
    "a receiver that leaves stops the sender": "test_a_receiver_that_leaves_stops_nobody",
    "keys stay in the store": "test_nothing_is_left_of_old_versions",
    "sent tensors are kept": "test_nothing_is_left_of_old_versions",
    "the source is read in advance": "test_the_source_is_read_as_it_is_sent",
}
"""Each fault, and the check that must fail because of it."""


@pytest.fixture
def faulty_engines(tmp_path: Path) -> Iterator[None]:
    with installed(HERE / "faulty_engines.py", {"hwrl.plugins": "faulty_engines"}, tmp_path):
        yield


@pytest.fixture
def faulty_transport(tmp_path: Path) -> Iterator[None]:
    with installed(HERE / "faulty_transports.py", {"hwrl.transports": "faulty_transports:FAULTY"}, tmp_path):
        yield


def check(kind: Kind, keyword: str = "") -> KitReport:
    return run_kit(Subject(kind, "faulty"), backend=hwrl.get_backend(), level=Level.ROLLOUT, keyword=keyword)


def assert_caught(report: KitReport, check: str) -> None:
    assert any(name.partition("::")[2].startswith(check) for name in report.failed), report.names("passed")


@pytest.mark.parametrize("name", TRAIN_FAULTS)
def test_the_kit_catches_a_train_engine(name: str, faulty_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", name)
    assert_caught(check(Kind.TRAIN_ENGINE, TRAIN_FAULTS[name]), TRAIN_FAULTS[name])


@pytest.mark.parametrize("name", ROLLOUT_FAULTS)
def test_the_kit_catches_a_rollout_engine(name: str, faulty_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", name)
    assert_caught(check(Kind.ROLLOUT_ENGINE, ROLLOUT_FAULTS[name]), ROLLOUT_FAULTS[name])


def test_a_failed_check_leaves_no_engine_asleep(faulty_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", "a second sleep frees again")
    failed = check(Kind.ROLLOUT_ENGINE, "TestRolloutSleep").failed
    assert {name.partition("[")[0] for name in failed} == {"TestRolloutSleep::test_it_generates_the_same_after_a_sleep"}


def test_an_engine_that_cannot_sleep_is_skipped_and_closed_once(
    faulty_engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HWRL_FAULT", "it cannot sleep")
    report = check(Kind.ROLLOUT_ENGINE, "TestRolloutSleep or test_abort_drops_every_request")
    assert (report.failed, report.names("passed")) == ([], ["TestRollout::test_abort_drops_every_request"])


@pytest.mark.parametrize("name", TRANSPORT_FAULTS)
def test_the_kit_catches_a_transport(name: str, faulty_transport: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_FAULT", name)
    assert_caught(check(Kind.TRANSPORT, TRANSPORT_FAULTS[name]), TRANSPORT_FAULTS[name])


@pytest.mark.parametrize("kind", [Kind.TRAIN_ENGINE, Kind.ROLLOUT_ENGINE])
def test_the_good_twin_of_the_engines_passes_every_check(kind: Kind, faulty_engines: None) -> None:
    report = check(kind)
    assert (report.failed, report.names("skipped")) == ([], [])
    checks = TRAIN_FAULTS if kind is Kind.TRAIN_ENGINE else ROLLOUT_FAULTS
    passed = {name.partition("::")[2].partition("[")[0] for name in report.names("passed")}
    assert passed == set(checks.values()), "a check without a fault, or a fault without a check"


def test_the_good_twin_of_the_transport_passes_every_check(faulty_transport: None) -> None:
    assert find_subject("faulty") == Subject(Kind.TRANSPORT, "faulty")
    report = check(Kind.TRANSPORT)
    assert (report.failed, report.names("skipped"), report.reached) == ([], [], Level.ROLLOUT)
    passed = {name.partition("::")[2] for name in report.names("passed")}
    assert passed == set(TRANSPORT_FAULTS.values())
