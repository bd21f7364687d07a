from __future__ import annotations

import os
from typing import Any

import pytest

import hwrl_cpu
from hwrl.errors import ConfigError, PlacementError
from hwrl.interfaces import Backend, BackendInfo, Capability, DeviceMap, Support
from hwrl.run.cluster.placement import (
    DeviceReport,
    DeviceReports,
    Machines,
    ProcessDevices,
    Reservation,
    assign_devices,
    check_devices,
    choose_senders,
    choose_transport,
    has_devices,
    machine_devices,
    make_device_report,
    make_visible,
)
from hwrl_npu.settings import DEVICES as ASCENDING

DEVICES = DeviceMap(visible_variable="VISIBLE", ray_resource="XPU")


def test_each_process_has_a_device_of_its_own_if_there_are_enough() -> None:
    assignment = assign_devices(devices=8, ranks=2, replicas=3, tensor_parallel=1, may_share=True)
    assert [place.devices for place in (*assignment.ranks, *assignment.replicas)] == [(0,), (1,), (2,), (3,), (4,)]
    assert {place.share for place in (*assignment.ranks, *assignment.replicas)} == {1.0}
    assert not assignment.shared and str(assignment) == "each process has its own device"


def test_replicas_share_what_the_trainer_leaves() -> None:
    assignment = assign_devices(devices=4, ranks=2, replicas=5, tensor_parallel=1, may_share=True)
    assert [place.share for place in assignment.ranks] == [1.0, 1.0]
    assert [place.devices for place in assignment.replicas] == [(2,), (3,), (2,), (3,), (2,)]
    assert assignment.shared and "the devices that the trainer does not use" in str(assignment)


def test_replicas_share_the_trainers_devices_if_nothing_is_left() -> None:
    assignment = assign_devices(devices=1, ranks=1, replicas=1, tensor_parallel=1, may_share=True)
    assert (assignment.ranks, assignment.replicas) == ((Reservation((0,), 0.6),), (Reservation((0,), 0.4),))
    assert assignment.shared and "the trainer's devices" in str(assignment)
    assert assignment.bundles == [(0,)]


def test_replicas_of_several_devices_have_them_to_themselves() -> None:
    assignment = assign_devices(devices=8, ranks=2, replicas=2, tensor_parallel=3, may_share=True)
    assert [place.devices for place in assignment.replicas] == [(2, 3, 4), (5, 6, 7)]
    assert {place.share for place in (*assignment.ranks, *assignment.replicas)} == {1.0}
    assert assignment.devices == 8 and not assignment.shared
    assert assignment.bundles == [(0,), (1,), (2, 3, 4), (5, 6, 7)]


@pytest.mark.parametrize("may_share", [True, False])
def test_replicas_of_several_devices_share_none(may_share: bool) -> None:
    wanted = r"needs 5 devices(.|\n)*rollout\.tensor_parallel=2 need devices of their own, and 4 are free"
    with pytest.raises(ConfigError, match=wanted):
        assign_devices(devices=4, ranks=1, replicas=2, tensor_parallel=2, may_share=may_share)


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_whatever_must_fit_fits_and_no_two_ranks_meet(devices: int, ranks: int) -> None:
    for replicas in range(1, 30):
        if ranks > devices:
            continue
        assignment = assign_devices(devices=devices, ranks=ranks, replicas=replicas, tensor_parallel=1, may_share=True)
        assert (len(assignment.ranks), len(assignment.replicas)) == (ranks, replicas)
        assert len({place.devices for place in assignment.ranks}) == ranks
        assert all(place.share > 0.5 for place in assignment.ranks)
        for device in range(assignment.devices):
            here = [place.share for place in (*assignment.ranks, *assignment.replicas) if place.devices == (device,)]
            assert sum(round(share * 10_000) for share in here) <= 10_000
            assert here, "a device serves nobody while others are shared"


def test_more_ranks_than_devices_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"train\.ranks=3 need devices of their own, and 2 are free"):
        assign_devices(devices=2, ranks=3, replicas=1, tensor_parallel=1, may_share=True)


def test_what_may_not_be_shared_is_not() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.replicas=2 need devices of their own, and 2 are free"):
        assign_devices(devices=2, ranks=1, replicas=2, tensor_parallel=1, may_share=False)


@pytest.mark.parametrize(
    ("facts", "able", "transport", "reason"),
    [
        ({"bypass_cpu": False}, set(Capability), "host", "bypass_cpu is false"),
        ({"shared": False}, {Capability.COLLECTIVES}, "device", "a device of its own"),
        (
            {},
            {Capability.COLLECTIVES, Capability.SHARED_DEVICE_GROUPS, Capability.DEVICE_IPC},
            "device",
            "shared_device_groups: yes",
        ),
        ({}, {Capability.COLLECTIVES, Capability.DEVICE_IPC}, "ipc", "on this machine"),
        ({"one_machine": False, "shared": False}, {Capability.COLLECTIVES}, "device", "a device of its own"),
        ({}, {Capability.COLLECTIVES}, "host", "device_ipc: no"),
        ({"shared": False}, {Capability.DEVICE_IPC}, "ipc", "no collectives (collectives: no)"),
        ({"shared": False}, set(), "host", "no collectives (collectives: no), and IPC is not possible"),
        ({"bypass_cpu": False}, set(), "host", "bypass_cpu is false"),
        ({"one_machine": False}, {Capability.DEVICE_IPC}, "device", "the data is staged through the host"),
    ],
)
def test_the_transport_follows_from_what_the_device_can(
    facts: dict[str, bool], able: set[Capability], transport: str, reason: str
) -> None:
    def supports(capability: Capability) -> Support:
        yes = capability in able
        return Support("supported" if yes else "unsupported", f"{capability.value}: {'yes' if yes else 'no'}")

    given = {"bypass_cpu": True, "shared": True, "one_machine": True} | facts
    chosen, why = choose_transport(supports=supports, **given)
    assert chosen == transport
    assert reason in why


@pytest.mark.parametrize(
    ("bypass_cpu", "able", "why"),
    [
        (True, {Capability.COLLECTIVES, Capability.DEVICE_IPC}, "share a device"),
        (False, {Capability.COLLECTIVES}, "bypass_cpu is false"),
    ],
)
def test_what_does_not_reach_all_machines_is_refused(bypass_cpu: bool, able: set[Capability], why: str) -> None:
    def supports(capability: Capability) -> Support:
        return Support("supported" if capability in able else "unsupported", "")

    with pytest.raises(ConfigError, match=why):
        choose_transport(bypass_cpu=bypass_cpu, shared=True, one_machine=False, supports=supports)


@pytest.mark.parametrize(
    ("given", "senders", "reason"),
    [
        ({"setting": 2}, 2, "weights.senders=2"),
        ({"ranks": 1}, 1, "one rank"),
        ({"transport": "ipc"}, 1, "by ipc"),
        ({"machines": None}, 1, "not known"),
        ({"machines": Machines(["a"] * 4, ["a"] * 4)}, 1, "on one machine"),
        ({}, 4, "a receiving machine has up to 8"),
        ({"ranks": 16, "machines": Machines(["a"] * 8 + ["b"] * 8, ["c"] * 9)}, 8, "16 ranks on 2 machines"),
        ({"machines": Machines(["a"] * 4, ["b", "c"])}, 1, "a receiving machine has up to 1"),
        ({"machines": Machines(["a", "a", "b", "b"], ["b"])}, 1, "a receiving machine has up to 1"),
        ({"own_devices": False, "machines": Machines(["a", "a", "b", "b"], ["b"])}, 2, "each of the trainer's"),
    ],
)
def test_the_senders_follow_from_the_machines(given: dict[str, Any], senders: int, reason: str) -> None:
    facts: dict[str, Any] = {"setting": "auto", "transport": "device", "ranks": 4, "own_devices": True}
    facts |= {"machines": Machines(["a"] * 4, ["b"] * 8)} | given
    chosen, why = choose_senders(facts.pop("setting"), **facts)
    assert chosen == senders and reason in why


@pytest.mark.parametrize("transport", ["host", "ipc"])
def test_several_senders_that_a_transport_does_not_allow_are_refused(transport: Any) -> None:
    facts: dict[str, Any] = {"transport": transport, "ranks": 2, "machines": None, "own_devices": True}
    with pytest.raises(ConfigError, match=rf"(?s)weights\.senders=2.*travel by {transport}.*weights\.senders=1"):
        choose_senders(2, **facts)
    assert choose_senders(1, **facts)[0] == 1


def test_a_process_sees_others_devices_behind_its_own() -> None:
    machine = machine_devices({"VISIBLE": "3,5,7"}, DEVICES, count=3)
    assert machine == (3, 5, 7)
    environment = {"VISIBLE": "5"}
    assert make_visible(ProcessDevices(1, opens=machine), DEVICES, environment) == (0,)
    assert environment == {"VISIBLE": "5,3,7"}


def test_a_machine_that_hides_nothing_numbers_its_devices_from_zero() -> None:
    assert machine_devices({}, DEVICES, count=2) == (0, 1)


@pytest.mark.parametrize(
    ("wanted", "devices", "before", "after", "own"),
    [
        (ProcessDevices(1, (1,), {}), DEVICES, {}, {"VISIBLE": "1"}, (0,)),
        (
            ProcessDevices(1, (1,), {"VISIBLE": "3,5"}),
            DEVICES,
            {"VISIBLE": "0"},
            {"VISIBLE": "5"},
            (0,),
        ),  # Ray had set it
        (ProcessDevices(1, (1,)), DEVICES, {"VISIBLE": "3,5"}, {"VISIBLE": "5"}, (0,)),
        (ProcessDevices(2, (2, 3), {}), DEVICES, {}, {"VISIBLE": "2,3"}, (0, 1)),
        (ProcessDevices(1), DEVICES, {"VISIBLE": "7"}, {"VISIBLE": "7"}, (0,)),  # Ray numbers it
        (ProcessDevices(1, (1,), {}, opens=(0, 1)), DEVICES, {}, {"VISIBLE": "1,0"}, (0,)),
        (ProcessDevices(1, (1,), {}), DeviceMap(ray_resource="XPU"), {}, {}, (1,)),
        (ProcessDevices(1, (1,), {}, opens=(0, 1)), DeviceMap(), {}, {}, (1,)),
    ],
)
def test_a_process_sees_the_devices_that_it_is_told(
    wanted: ProcessDevices, devices: DeviceMap, before: dict[str, str], after: dict[str, str], own: tuple[int, ...]
) -> None:
    env = dict(before)
    assert make_visible(wanted, devices, env) == own
    assert env == after


def test_a_process_finds_its_own_device_where_numbers_must_ascend() -> None:
    env: dict[str, str] = {}
    assert make_visible(ProcessDevices(1, (1,), {}, opens=(0, 1)), ASCENDING, env) == (1,)
    assert ASCENDING.visible(env) == (0, 1)


class Two(hwrl_cpu.CpuBackend):
    """Two devices that a variable narrows, if one reads it."""

    devices = DEVICES
    reads = True

    def device_count(self) -> int:
        return len(self.devices.visible(os.environ) or (0, 1)) if self.reads else 2


class Telling(Two):
    def device_uuid(self, index: int) -> str:
        return f"uuid-{index}"


def test_a_process_that_sees_hidden_devices_or_misses_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, wanted = Two(hwrl_cpu.INFO), ProcessDevices(1, (1,), {})
    monkeypatch.setenv("VISIBLE", "1")
    check_devices(wanted, (0,), backend, os.environ)
    with pytest.raises(PlacementError, match=r"this process has no device 1(.|\n)*it sees 1 devices.*\(VISIBLE=1\)"):
        check_devices(wanted, (1,), backend, os.environ)
    backend.reads = False
    with pytest.raises(PlacementError, match=r"VISIBLE does not hide(.|\n)*sees 2 devices with VISIBLE=1"):
        check_devices(wanted, (0,), backend, os.environ)


def test_a_process_reports_its_current_device_as_the_machine_numbers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISIBLE", "1")
    held = make_device_report((0,), Two(hwrl_cpu.INFO))
    assert held.names == ("1",) and held.keys[0].endswith(" 1")
    assert make_device_report((0,), Telling(hwrl_cpu.INFO)).keys == ("uuid-0",)
    monkeypatch.setenv("VISIBLE", "4,5")
    assert make_device_report((0, 1), Two(hwrl_cpu.INFO)).names == ("4", "5")


def test_two_processes_on_one_device_are_refused_unless_their_seats_share_it() -> None:
    def on(*names: str, host: str = "a") -> DeviceReport:
        return DeviceReport(host, names, tuple(f"{host} {name}" for name in names))

    reports = DeviceReports(["trainer rank 0", "replica-0", "replica-1"])
    reports.add("replica-0", Reservation((1, 2), 1.0), on("1", "2"))
    reports.add("trainer rank 0", Reservation((0,), 1.0), on("0"))
    assert str(reports) == "trainer rank 0 on device 0, replica-0 on device 1+2"
    with pytest.raises(PlacementError, match=r"replica-1 and replica-0 are on the same device(.|\n)*device 2 of a"):
        reports.add("replica-1", Reservation((3,), 1.0), on("2"))
    reports.add("replica-1", Reservation((0,), 0.4), on("0"))
    reports.remove("replica-1")
    reports.add("replica-1", Reservation((3,), 1.0), on("2", host="b"))
    assert str(reports).endswith("replica-0 on device 1+2 of a, replica-1 on device 2 of b")


def test_a_host_has_no_devices_to_divide_and_a_device_that_says_nothing_has() -> None:
    assert not has_devices(hwrl_cpu.CpuBackend(hwrl_cpu.INFO))
    assert has_devices(Backend(BackendInfo(name="bare", device_type="cpu", description="a device without a map")))


def test_a_replica_of_two_workers_fits_on_a_host_without_devices() -> None:
    check_devices(ProcessDevices(count=2), (0, 1), hwrl_cpu.CpuBackend(hwrl_cpu.INFO), {})
