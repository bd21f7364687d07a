"""The contract of a backend's plugin, before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from hwrl.discovery import Plugin, Probed, Registry
from hwrl.interfaces import Backend, ProbeContext
from hwrl.testing.levels import Level
from hwrl.testing.limits import scaled

MAX_PROBE_MS = 50.0

_PROBE_ALONE = """
import json, os, sys
from hwrl.discovery import Registry
before = dict(os.environ)
Registry(env=os.environ | {"HWRL_BACKEND": sys.argv[1]}).choose()
print(json.dumps({"torch": "torch" in sys.modules, "env": before == dict(os.environ)}))
"""


class PluginContract:
    """The plugin is found, its identity is right, and its probe is quick, pure and never raises."""

    level: ClassVar[Level] = Level.DEVICE

    def test_it_is_found_by_its_name(self, backend: Backend) -> None:
        """An installed entry point has the backend's name and info."""
        assert _plugin(backend).info == backend.info

    def test_its_info_is_complete(self, backend: Backend) -> None:
        """The name is valid in an environment variable, and there is a description for users."""
        assert backend.info.name == backend.info.name.strip().lower() != ""
        assert backend.info.description
        assert backend.info.device_type

    def test_it_is_probed_without_torch(self, backend: Backend) -> None:
        """Importing the plugin and probing imports no torch and does not change the environment."""
        found = _run_alone(_PROBE_ALONE, backend.info.name)
        assert not found["torch"], "the plugin's module or its probe imports torch"
        assert found["env"], "the plugin's module or its probe changes the environment"

    def test_its_probe_says_yes_where_it_runs(self, backend: Backend) -> None:
        """This test runs on the backend, so its probe must not answer "no" here; it gives a reason."""
        probed = _probe(backend)
        assert not probed.faulty, probed.result.reason
        assert probed.result.answer != "no"
        assert probed.result.reason

    def test_its_probe_is_quick(self, backend: Backend) -> None:
        """Detection runs every probe in every process."""
        fastest_ms = min(_probe(backend).duration_ms for _ in range(3))
        if fastest_ms > scaled(MAX_PROBE_MS):
            raise TimeoutError(f"it took {fastest_ms:g} ms, and did not answer within {scaled(MAX_PROBE_MS):g} ms")

    def test_its_probe_denies_an_empty_machine(self, backend: Backend, tmp_path: Path) -> None:
        """Without device files, variables and modules, even torch, the answer is "no"; the probe does not raise."""
        bare = ProbeContext(env={}, find_spec=lambda name: None, root=tmp_path)
        result = _plugin(backend).manager.hook.hwrl_probe(context=bare)
        assert result.answer == "no"
        assert result.reason
        assert result.evidence == ()


def _probe(backend: Backend) -> Probed:
    for probed in Registry(env=dict(os.environ)).survey().probed:
        if probed.plugin.info.name == backend.info.name:
            return probed
    raise AssertionError(f"no installed entry point gives backend {backend.info.name!r}: is its package installed?")


def _plugin(backend: Backend) -> Plugin:
    return _probe(backend).plugin


def _run_alone(code: str, *args: str) -> Any:
    """Run ``code`` in a new interpreter with the same packages; return its JSON output."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", code, *args]
    ended = subprocess.run(command, env=env, text=True, capture_output=True, check=False, timeout=scaled(60.0))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])
