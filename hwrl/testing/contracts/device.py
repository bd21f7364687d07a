"""The contracts of the device, its streams, events and random numbers, of capabilities, and of device numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from hwrl.errors import ConfigError, UnsupportedError
from hwrl.interfaces import Backend, Capability
from hwrl.testing.contracts.need import need_claim
from hwrl.testing.levels import Level

_MANY = 1 << 20
_MEASURED_S = 0.05
_MOST_S = 0.5
_TRIES = 3


class DeviceContract:
    """Work on the device runs in order, can be waited for, and gives the same results again."""

    level: ClassVar[Level] = Level.DEVICE

    def test_it_sees_a_device(self, backend: Backend) -> None:
        """There is at least one. After ``set_device``, ``device`` and ``current_index`` name that one."""
        assert backend.device_count() >= 1
        for index in range(backend.device_count()):
            backend.set_device(index)
            assert backend.current_index() == index
            assert backend.device() == backend.device(index)
        backend.set_device(0)

    def test_its_device_is_of_the_type_that_it_names(self, backend: Backend) -> None:
        """``info.device_type`` is torch's name of the device."""
        assert backend.device().type == backend.info.device_type
        assert torch.ones(1, device=backend.device()).device.type == backend.info.device_type

    def test_work_is_done_after_synchronize(self, backend: Backend) -> None:
        """A queued copy to the host has the result."""
        ones = torch.ones(_MANY, device=backend.device())
        there = torch.empty(_MANY)
        there.copy_(ones * 3, non_blocking=True)
        backend.synchronize()
        assert bool((there == 3).all())

    def test_streams_keep_order(self, backend: Backend) -> None:
        """``wait_stream`` and ``wait_event`` order the work of two streams, concurrent or not."""
        main, side = backend.current_stream(), backend.stream()
        value = torch.ones(_MANY, device=backend.device())
        for _ in range(10):
            side.wait_stream(main)
            with side:
                value.mul_(2)
            main.wait_event(side.record_event())
            value.add_(1)
        main.synchronize()
        assert main.query()
        assert side.query()
        assert bool((value == 2047).all())  # x -> 2x + 1, ten times, from 1

    def test_events_mark_time(self, backend: Backend) -> None:
        """``synchronize`` waits for a recorded event, and time does not run backwards between events."""
        begin, end = backend.event(timing=True), backend.event(timing=True)
        begin.record()
        torch.ones(_MANY, device=backend.device()).mul_(2)
        end.record()
        end.synchronize()
        assert begin.query()
        assert end.query()
        assert begin.elapsed_time(end) >= 0.0

    def test_events_measure_milliseconds(self, backend: Backend) -> None:
        """``elapsed_time`` agrees with the host's clock, read before and after each of two events."""
        begin, end = backend.event(timing=True), backend.event(timing=True)
        backend.synchronize()
        earliest_s = time.perf_counter()
        begin.record()
        begin.synchronize()
        begun_s = time.perf_counter()
        while time.perf_counter() < begun_s + _MEASURED_S:
            pass
        ending_s = time.perf_counter()
        end.record()
        end.synchronize()
        least_ms, most_ms = 1e3 * (ending_s - begun_s), 1e3 * (time.perf_counter() - earliest_s)
        measured = begin.elapsed_time(end)
        assert least_ms * 0.9 - 1 <= measured <= most_ms * 1.1 + 1, (
            f"elapsed_time returned {measured:g} between events that lie {least_ms:g} to {most_ms:g} milliseconds apart"
        )

    def test_random_numbers_repeat(self, backend: Backend) -> None:
        """A restored state gives the same numbers. A returned state is a copy: later draws do not change it."""
        state = backend.rng_state()
        place = (state.dtype, state.device.type)
        assert place == (torch.uint8, "cpu"), f"rng_state returned {place}, and must return bytes on the host"
        kept = state.clone()
        first = self._draw(backend)
        assert torch.equal(state, kept), "rng_state must return a copy"
        assert not torch.equal(first, self._draw(backend)), "two draws in a row are the same"
        backend.set_rng_state(state)
        again = self._draw(backend)
        assert torch.equal(first, again), (
            f"after set_rng_state(rng_state()) come {again[:3].tolist()}, not {first[:3].tolist()} again: both must "
            "be about the generator that torch.rand uses on the device"
        )

    def test_a_seed_decides_random_numbers(self, backend: Backend) -> None:
        """Equal seeds give equal numbers; other seeds give others."""
        state = backend.rng_state()
        draws = []
        for seed in (11, 12, 11):
            backend.seed(seed)
            draws.append(self._draw(backend))
        backend.set_rng_state(state)
        assert torch.equal(draws[0], draws[2]), "the same seed gives other numbers"
        assert not torch.equal(draws[0], draws[1]), "another seed gives the same numbers: seed() does nothing"

    def _draw(self, backend: Backend) -> torch.Tensor:
        return torch.rand(100, device=backend.device()).cpu()

    def test_a_profiler_range_is_a_context(self, backend: Backend) -> None:
        """It lets exceptions through and can be nested."""
        with pytest.raises(KeyError), backend.range("outer"), backend.range("inner"):
            raise KeyError


class CapabilityContract:
    """``supports`` tells the truth, and unsupported calls raise."""

    level: ClassVar[Level] = Level.DEVICE

    @pytest.mark.parametrize("capability", Capability)
    def test_each_has_an_answer_with_a_reason(self, backend: Backend, capability: Capability) -> None:
        """For every capability, also one that is newer than the backend."""
        support = backend.supports(capability)
        assert support.state in ("supported", "unsupported", "unverified")
        assert support.reason

    @pytest.mark.parametrize("capability", Capability)
    def test_require_agrees(self, backend: Backend, capability: Capability) -> None:
        """``require`` raises for unsupported capabilities, and for no others."""
        if backend.supports(capability).usable:
            backend.require(capability, needed_for="test it")
        else:
            with pytest.raises(UnsupportedError, match="test it"):
                backend.require(capability, needed_for="test it")

    def test_claimed_streams_run_beside_the_caller(self, backend: Backend) -> None:
        """Work on a side stream is not yet done when the calls that queued it have returned.

        A busy host may come back late, so the work grows until the host itself must have waited for it.
        """
        need_claim(backend, Capability.STREAMS)
        side, matrix = backend.stream(), torch.full((1024, 1024), 1e-3, device=backend.device())
        products, long_tries = 1, 0
        while long_tries < _TRIES:
            backend.synchronize()
            begun_s = time.perf_counter()
            with side:
                for _ in range(products):
                    torch.mm(matrix, matrix)
            if not side.query():
                side.synchronize()
                return
            long = time.perf_counter() - begun_s > _MOST_S
            long_tries, products = long_tries + long, products if long else 2 * products
        pytest.fail("queued work was done each time the calls returned: it runs in the caller; say unsupported")

    @pytest.mark.parametrize(
        "capability",
        [
            Capability.PINNED_MEMORY,
            Capability.REGISTERED_MEMORY,
            Capability.COMM_ABORT,
            Capability.DEVICE_IPC,
        ],
    )
    def test_what_is_unsupported_raises(self, backend: Backend, capability: Capability) -> None:
        """A call without the needed capability raises. It must not return and do nothing."""
        calls: dict[Capability, Callable[[], Any]] = {
            Capability.PINNED_MEMORY: lambda: backend.pinned_empty(16),
            Capability.REGISTERED_MEMORY: lambda: backend.register_host_memory(torch.empty(16, dtype=torch.uint8)),
            Capability.COMM_ABORT: lambda: backend.abort_process_group(_NoGroup()),  # type: ignore[arg-type] # refused unseen
            Capability.DEVICE_IPC: lambda: backend.export_memory(torch.ones(1, device=backend.device())),
        }
        if not backend.supports(capability).usable:
            with pytest.raises(UnsupportedError):
                calls[capability]()


class _NoGroup:
    def abort(self) -> None:
        """Do nothing, as several libraries do."""


class DeviceMapContract:
    """``devices`` reads a process's visible devices from an environment, and renders one for them."""

    level: ClassVar[Level] = Level.DEVICE

    @pytest.mark.parametrize("ids", [(0,), (0, 1), (1, 3, 6)])
    def test_what_is_rendered_is_visible(self, backend: Backend, ids: tuple[int, ...]) -> None:
        """For ascending numbers, ``visible`` reads the output of ``render``."""
        env = backend.devices.render(ids)
        if backend.devices.visible_variable is None:
            assert env == {}
            assert backend.devices.visible(env) is None
        else:
            assert backend.devices.visible(env) == ids
            assert [backend.devices.to_physical(index, env) for index in range(len(ids))] == list(ids)

    def test_without_the_variable_nothing_is_narrowed(self, backend: Backend) -> None:
        """Without it, a process uses the machine's numbers."""
        assert backend.devices.visible({}) is None
        assert backend.devices.to_physical(2, {}) == 2

    @pytest.mark.parametrize("text", ["0,0", "first", "0,,1"])
    def test_an_unreadable_list_is_an_error(self, backend: Backend, text: str) -> None:
        """It must raise: some runtimes silently drop an unreadable entry and show fewer devices."""
        variable = backend.devices.visible_variable
        if variable is not None:
            with pytest.raises(ConfigError, match=variable):
                backend.devices.visible({variable: text})

    def test_devices_can_be_reserved(self, backend: Backend) -> None:
        """The options for Ray contain the number of devices."""
        assert 2 in [
            *backend.devices.ray_options(2).values(),
            *backend.devices.ray_options(2).get("resources", {}).values(),
        ]
