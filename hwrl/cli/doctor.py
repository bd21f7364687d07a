"""``hwrl doctor``: report the installed backends and their probes, the chosen backend, versions and settings."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from hwrl import __version__
from hwrl.cli import deepcheck, livecheck
from hwrl.discovery import BACKEND_ENTRY_POINTS, Probed, Registry
from hwrl.discovery.loading import Plugin, PluginFault, reason_of, run_plugin_code
from hwrl.discovery.registry import TORCH_EXTENSIONS
from hwrl.discovery.rehearsal import why_unsafe
from hwrl.discovery.typed import type_mismatch
from hwrl.errors import BackendError, HwrlError
from hwrl.interfaces import Finding, ProbeContext
from hwrl.testing.limits import TIMEOUT_SCALE

HELP = "show backends, versions and settings, and check that the chosen backend can run"

_VARIABLES = re.compile(
    r"HWRL_\w+|OMP_NUM_THREADS|MKL_NUM_THREADS|RAY_ADDRESS|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE"
    r"|PYTORCH_ALLOC_CONF|TORCH_DEVICE_BACKEND_AUTOLOAD|PYTHONPATH"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--deep", action="store_true", help="also try a run's calls one by one, each in a process: some minutes"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 if the chosen backend can run, else 1."""
    if args.deep:
        deepcheck.require_kit()
    with contextlib.redirect_stdout(sys.stderr):  # a plugin may print: the report is alone on stdout
        report = examine(Registry(), env=os.environ)
        if args.deep and report.get("live", {}).get("ok"):
            report |= _examine_deeply(report)
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
    return 0 if report["ok"] else 1


def examine(registry: Registry, *, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the report as plain data. Its ``ok`` is true if the chosen backend can run and no finding is an error."""
    survey = registry.survey()
    backends = {probed.plugin.info.name: _describe(probed, ProbeContext(env=env)) for probed in survey.probed}
    report = {
        "ok": False,
        "hwrl": __version__,
        "chosen": None,
        "backends": list(backends.values()),
        "load_failures": [dataclasses.asdict(failure) for failure in survey.failures],
        "versions": _versions(),
        "environment": {name: value for name, value in sorted(env.items()) if _VARIABLES.fullmatch(name)},
    }
    try:
        choice = registry.choose()
    except BackendError as error:
        return report | {"why": f"{error.what}: {error.why}", "fix": error.fix}
    name = choice.plugin.info.name
    live = livecheck.check(name)
    errors = [finding for finding in backends[name]["findings"] if finding["level"] == "error"]
    return report | {"ok": live["ok"] and not errors, "chosen": name, "why": choice.why, "live": live}


def _examine_deeply(report: dict[str, Any]) -> dict[str, Any]:
    """Return the new entries of ``report``: the steps, and its ``ok`` with them. Prints each step when it ends."""
    found = []
    for step in deepcheck.steps(report["chosen"]):
        print(_step_line(step), flush=True)
        found.append(step)
    return {"deep": found, "ok": report["ok"] and all(step["outcome"] in ("passed", "skipped") for step in found)}


def _step_line(step: Mapping[str, Any]) -> str:
    return f"  {step['step']:<26} {step['outcome']:<8} {step['seconds']:>6.1f} s  {step['reason']}".rstrip()


def _describe(probed: Probed, context: ProbeContext) -> dict[str, Any]:
    plugin = probed.plugin
    return {
        "name": plugin.info.name,
        "names": plugin.names,
        "description": plugin.info.description,
        "fallback": plugin.info.fallback,
        "module": plugin.value,
        "distribution": plugin.distribution,
        **dataclasses.asdict(probed.result),
        "duration_ms": round(probed.duration_ms, 3),
        "findings": [dataclasses.asdict(finding) for finding in _findings(plugin, context)],
    }


def _findings(plugin: Plugin, context: ProbeContext) -> list[Finding]:
    for entry in importlib.metadata.entry_points(group=BACKEND_ENTRY_POINTS, value=plugin.value):
        unsafe = why_unsafe(entry, "hwrl_doctor")
        if unsafe:
            return [Finding("warning", f"the plugin {plugin.value} is broken: {unsafe}")]
    try:
        found = run_plugin_code(lambda: list(chain.from_iterable(plugin.manager.hook.hwrl_doctor(context=context))))
    except (PluginFault, HwrlError) as fault:
        return [Finding("warning", f"hwrl_doctor of {plugin.value} raised {reason_of(fault)}")]
    return [_checked(plugin, finding) for finding in found]


def _checked(plugin: Plugin, finding: Any) -> Finding:
    """Return ``finding``, or a warning about the plugin if ``finding`` has another type."""
    wrong = type_mismatch(finding, Finding, name="a finding")
    return Finding("warning", f"hwrl_doctor of {plugin.value} gave a wrong answer: {wrong}") if wrong else finding


def _versions() -> dict[str, str]:
    """Return the versions of python, of hwrl's and the backends' dependencies, and of torch's extensions.

    They come from package metadata; nothing is imported. Development tools are left out.
    """
    needed = [
        text for name in {"hwrl", *_packages(BACKEND_ENTRY_POINTS)} for text in importlib.metadata.requires(name) or []
    ]
    used = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in needed if not re.search(r"extra == .dev", text)}
    return {"python": platform.python_version(), "platform": platform.platform()} | {
        name: _version(name) for name in sorted((used | _packages(TORCH_EXTENSIONS)) - {"hwrl"})
    }


def _packages(group: str) -> set[str]:
    """Return the distributions with entry points of ``group``."""
    return {entry.dist.name for entry in importlib.metadata.entry_points(group=group) if entry.dist is not None}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"hwrl {report['hwrl']}"
    yield "\nbackends"
    for backend in report["backends"]:
        yield from _backend_lines(backend)
    for failure in report["load_failures"]:
        yield f"  {'/'.join(failure['names']):<12} broken   {failure['reason']}"
    for title in ("versions", "environment"):
        yield f"\n{title}"
        yield from (f"  {name:<24} {value}" for name, value in report[title].items())
    if report["chosen"]:
        yield from _live_lines(report["chosen"], report["live"])
    if "deep" in report:
        yield f"\ndeep check of {report['chosen']}"
        yield from map(_step_line, report["deep"])
    yield f"\nchosen: {report['chosen'] or 'none'}\n  why: {report['why']}"
    if report.get("fix"):
        yield f"  fix: {report['fix']}"
    tried = {step["outcome"] for step in report.get("deep", [])}
    if report.get("live", {}).get("slow") or ("slow" in tried and "failed" not in tried):
        yield f"\nNOT ok: a check took too long; on a busy machine try again, or with {TIMEOUT_SCALE}=4"
    else:
        failed = "a run would fail there" if "failed" in tried else "no run is possible like this"
        yield "\nok: the chosen backend can run" if report["ok"] else f"\nNOT ok: {failed}"


def _backend_lines(backend: dict[str, Any]) -> Iterator[str]:
    yield f"  {backend['name']:<12} {backend['answer']:<8} {backend['reason']}"
    if backend["evidence"]:
        yield f"{'':<23} found {', '.join(backend['evidence'])}"
    names = ", ".join(backend["names"])
    yield f"{'':<23} {backend['description']}; names: {names}"
    yield f"{'':<23} {backend['module']} from {backend['distribution']}, probed in {backend['duration_ms']:.1f} ms"
    for finding in backend["findings"]:
        fix = f" -> {finding['fix']}" if finding["fix"] else ""
        yield f"{'':<23} {finding['level']}: {finding['message']}{fix}"


def _live_lines(name: str, live: dict[str, Any]) -> Iterator[str]:
    yield f"\nlive check of {name}"
    if "device_count" in live:
        yield f"  {'devices':<24} {live['device_count']}"
    for capability, (state, reason) in live.get("capabilities", {}).items():
        yield f"  {capability:<24} {state:<12} {reason}"
    if live["ok"]:
        peak = live["peak_flops"]
        number = f"{peak / 1e12:g} TFLOP/s" if peak else "unknown: a run reports no MFU"
        yield f"  {'peak in bfloat16':<24} {number}"
        yield f"  {'fused operations':<24} {', '.join(live['kernels']) or 'none'}"
    if live.get("capabilities", {}).get("collectives", [""])[0] == "unsupported":
        yield f"  {'groups of processes':<24} staged through the host; on one machine, weights travel by ipc or host"
    yield f"  {'result':<24} {'computed and copied correctly' if live['ok'] else live['why']}"
