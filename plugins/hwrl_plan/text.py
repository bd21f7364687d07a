"""A plan as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from hwrl.interfaces import MemoryCause
from hwrl.run import gib
from hwrl_plan.levers import Suggestion
from hwrl_plan.planning import PlannedDevice, RunPlan
from hwrl_plan.processes import Link


def plan_as_text(plan: RunPlan, suggestions: Sequence[Suggestion]) -> str:
    """Return ``plan`` as Markdown: tables of memory and links, the verdict, and ``suggestions`` if it does not fit."""
    return "\n".join(_lines(plan, suggestions))


def _model(directory: Path) -> str:
    """Return the name of the model in ``directory``, which may be in the hub's cache."""
    cached = directory.parent.name == "snapshots"
    return directory.parents[1].name.removeprefix("models--") if cached else directory.name


def _lines(plan: RunPlan, suggestions: Sequence[Suggestion]) -> Iterator[str]:
    config, hardware = plan.config, plan.hardware
    yield (
        f"{_model(config.model.path)}: {config.train.ranks} trainer rank(s), {config.rollout.replicas} replica(s) of "
        f"{config.rollout.tensor_parallel} device(s), on {hardware.devices} devices of {gib(hardware.device_nbytes)}, "
        f"{hardware.nodes} node(s)"
    )
    if plan.placed:
        yield f"placement: {plan.placed}"
    for device in plan.devices:
        yield ""
        yield from _device_lines(device, hardware.device_nbytes)
    if plan.processes:
        yield ""
        yield from _host_lines(plan)
        yield ""
        yield from _link_lines(plan.links, hardware.bandwidth)
    yield ""
    for sentence in plan.unknown:
        yield f"unknown: {sentence}"
    yield from verdict(plan, suggestions)


def verdict(plan: RunPlan, suggestions: Sequence[Suggestion]) -> Iterator[str]:
    """Yield a sentence on whether ``plan`` fits. If it does not, also yield the suggested settings."""
    if plan.fits:
        yield "It fits."
        return
    for sentence in plan.misfits:
        yield f"It does not fit: {sentence}."
    for suggestion in suggestions:
        costs = "; ".join(dict.fromkeys(lever.cost for lever in suggestion.levers))
        yield f"It would fit with: {' '.join(suggestion.overrides)} ({costs})"
    if not suggestions:
        yield "No settings of hwrl make it fit: use more devices, or devices with more memory."


def _device_lines(device: PlannedDevice, limit: int) -> Iterator[str]:
    yield f"{device.count} x {device.name}: {gib(device.nbytes)} of {gib(limit)} at the peak"
    yield ""
    yield "| process | phase | cause | GiB |"
    yield "|---|---|---|---:|"
    for process, phase in zip(device.processes, device.phases, strict=True):
        for cause in process.causes:
            if cause.place == "device" and phase in cause.phases:
                yield f"| {process.name} | {phase} | {_named(cause)} | {cause.nbytes / (1 << 30):.2f} |"


def _named(cause: MemoryCause) -> str:
    return cause.cause if cause.certain else f"{cause.cause} (estimate)"


def _host_lines(plan: RunPlan) -> Iterator[str]:
    limit = "" if plan.hardware.host_nbytes is None else f" of {gib(plan.hardware.host_nbytes)}"
    yield f"host memory: {gib(plan.host_nbytes)}{limit} on the node with the most"
    yield ""
    yield "| process | cause | GiB |"
    yield "|---|---|---:|"
    for process in plan.processes:
        for cause in process.causes:
            if cause.place == "host":
                yield f"| {process.name} | {_named(cause)} | {cause.nbytes / (1 << 30):.2f} |"


def _link_lines(links: Sequence[Link], bandwidth: float) -> Iterator[str]:
    yield f"one update of the weights, at {bandwidth / 1e9:g} GB/s on each link:"
    yield ""
    yield "| link | GB | seconds |"
    yield "|---|---:|---:|"
    for link in links:
        name = f"{link.name}, once" if link.start else link.name
        yield f"| {name} | {link.nbytes / 1e9:.2f} | {link.seconds(bandwidth):.3f} |"


def plan_as_json(plan: RunPlan, suggestions: Sequence[Suggestion]) -> str:
    """Return ``plan`` as JSON, with sizes in bytes and times in seconds."""
    return json.dumps(
        {
            "fits": plan.fits,
            "misfits": list(plan.misfits),
            "unknown": list(plan.unknown),
            "placement": plan.placed,
            "devices": [
                {
                    "device": device.name,
                    "count": device.count,
                    "processes": [process.name for process in device.processes],
                    "phases": device.phases,
                    "nbytes": device.nbytes,
                }
                for device in plan.devices
            ],
            "processes": [
                {"process": process.name, "count": process.count, "causes": [asdict(cause) for cause in process.causes]}
                for process in plan.processes
            ],
            "host_nbytes": plan.host_nbytes,
            "links": [
                {
                    "link": link.name,
                    "nbytes": link.nbytes,
                    "once": link.start,
                    "s": link.seconds(plan.hardware.bandwidth),
                }
                for link in plan.links
            ],
            "suggestions": [suggestion.overrides for suggestion in suggestions],
        },
        indent=1,
    )
