from __future__ import annotations

import pytest

from hwrl.backend import Capability, DeviceMap, Support
from hwrl.errors import ConfigError
from hwrl.run.placement import Seat, check_ranks, choose_transport, machine_devices, seat, see_also

DEVICES = DeviceMap(visible_variable="VISIBLE", ray_resource="XPU")


def test_each_process_has_a_device_of_its_own_if_there_are_enough() -> None:
    seating = seat(devices=8, ranks=2, replicas=3, width=1, may_share=True)
    assert [place.devices for place in (*seating.ranks, *seating.replicas)] == [(0,), (1,), (2,), (3,), (4,)]
    assert {place.share for place in (*seating.ranks, *seating.replicas)} == {1.0}
    assert not seating.shared and str(seating) == "no process shares a device"


def test_replicas_share_what_the_trainer_leaves() -> None:
    seating = seat(devices=4, ranks=2, replicas=5, width=1, may_share=True)
    assert [place.share for place in seating.ranks] == [1.0, 1.0]
    assert [place.devices for place in seating.replicas] == [(2,), (3,), (2,), (3,), (2,)]
    assert seating.shared and "those that the trainer leaves" in str(seating)


def test_replicas_share_the_trainers_devices_if_nothing_is_left() -> None:
    seating = seat(devices=1, ranks=1, replicas=1, width=1, may_share=True)
    assert (seating.ranks, seating.replicas) == ((Seat((0,), 0.6),), (Seat((0,), 0.4),))
    assert seating.shared and "the trainer's" in str(seating)
    assert seating.bundles == [(0,)]


def test_replicas_of_several_devices_have_them_to_themselves() -> None:
    seating = seat(devices=8, ranks=2, replicas=2, width=3, may_share=True)
    assert [place.devices for place in seating.replicas] == [(2, 3, 4), (5, 6, 7)]
    assert {place.share for place in (*seating.ranks, *seating.replicas)} == {1.0}
    assert seating.devices == 8 and not seating.shared
    assert seating.bundles == [(0,), (1,), (2, 3, 4), (5, 6, 7)]


@pytest.mark.parametrize("may_share", [True, False])
def test_replicas_of_several_devices_share_none(may_share: bool) -> None:
    wanted = r"needs 5 devices(.|\n)*rollout\.replicas=2 of rollout\.tensor_parallel=2 share none, and 4 are free"
    with pytest.raises(ConfigError, match=wanted):
        seat(devices=4, ranks=1, replicas=2, width=2, may_share=may_share)


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_whatever_must_fit_fits_and_no_two_ranks_meet(devices: int, ranks: int) -> None:
    for replicas in range(1, 30):
        if ranks > devices:
            continue
        seating = seat(devices=devices, ranks=ranks, replicas=replicas, width=1, may_share=True)
        assert (len(seating.ranks), len(seating.replicas)) == (ranks, replicas)
        assert len({place.devices for place in seating.ranks}) == ranks
        assert all(place.share > 0.5 for place in seating.ranks)
        for device in range(seating.devices):
            here = [place.share for place in (*seating.ranks, *seating.replicas) if place.devices == (device,)]
            assert sum(round(share * 10_000) for share in here) <= 10_000
            assert here, "a device serves nobody while others are shared"


def test_more_ranks_than_devices_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"train\.ranks=3 share none, and 2 are free"):
        seat(devices=2, ranks=3, replicas=1, width=1, may_share=True)


def test_what_may_not_be_shared_is_not() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.replicas=2 share none, and 2 are free"):
        seat(devices=2, ranks=1, replicas=2, width=1, may_share=False)


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
        (True, {Capability.DEVICE_IPC}, "no collectives(.|\n)*unset RAY_ADDRESS"),
    ],
)
def test_what_does_not_reach_all_machines_is_refused(bypass_cpu: bool, able: set[Capability], why: str) -> None:
    def supports(capability: Capability) -> Support:
        return Support("supported" if capability in able else "unsupported", "")

    with pytest.raises(ConfigError, match=why):
        choose_transport(bypass_cpu=bypass_cpu, shared=True, one_machine=False, supports=supports)


def test_several_ranks_need_collectives() -> None:
    check_ranks(1, collectives=Support("unsupported", "no library"))
    check_ranks(2, collectives=Support("unverified", "torch's"))
    with pytest.raises(ConfigError, match=r"(?s)train\.ranks=2.*no library.*train\.ranks=1"):
        check_ranks(2, collectives=Support("unsupported", "no library"))


def test_a_process_sees_others_devices_behind_its_own() -> None:
    machine = machine_devices({"VISIBLE": "3,5,7"}, DEVICES, count=3)
    assert machine == (3, 5, 7)
    assert see_also(machine, {"VISIBLE": "5"}, DEVICES) == {"VISIBLE": "5,3,7"}
    assert see_also((), {"VISIBLE": "5"}, DEVICES) == {}


def test_a_machine_that_hides_nothing_numbers_its_devices_from_zero() -> None:
    assert machine_devices({}, DEVICES, count=2) == (0, 1)
