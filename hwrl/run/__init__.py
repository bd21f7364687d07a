"""Training runs: ``hwrl train`` from its configuration to the trained model. Importing this package is cheap.

The driver, which is the process of ``hwrl train``:

- :mod:`hwrl.run.pipeline` is the loop over the training steps; start reading there.
- :mod:`hwrl.run.fleet` starts, calls and watches the other processes.
  :mod:`hwrl.run.interrupts` handles signals.
- :mod:`hwrl.run.cluster` starts or joins Ray, and places the processes on devices.
- :mod:`hwrl.run.report` writes metrics and logs.
- Files in the run directory: :mod:`hwrl.run.run_directory` claims it, :mod:`hwrl.run.scaling` exchanges requests of
  ``hwrl scale`` there. :mod:`hwrl.run.inputs` checks the input files before the start, and :mod:`hwrl.run.identity`
  compares their hashes later.

The other processes run the code in :mod:`hwrl.run.processes`: trainer ranks, replicas and the prompt ledger. The same
package has the handles with which one process calls another.

Without a run: :mod:`hwrl.run.config` is the configuration, :mod:`hwrl.run.plan` computes memory and link traffic for
``hwrl plan``, and :mod:`hwrl.run.demo` writes the demo's files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.run.cluster.placement import machine_devices
    from hwrl.run.cluster.ray_session import ray_cluster
    from hwrl.run.config import Config, dump_config, load_config
    from hwrl.run.demo import write_demo
    from hwrl.run.inputs import check_inputs
    from hwrl.run.interrupts import Interrupts
    from hwrl.run.pipeline import run_training
    from hwrl.run.processes.handles import LedgerHandle
    from hwrl.run.report import LiveView, Metrics, PlainView, make_view, read_lines, read_metrics
    from hwrl.run.report.bottleneck import busy_shares
    from hwrl.run.report.summary import Summary

_MODULE_OF = {
    "Config": "config",
    "Interrupts": "interrupts",
    "LedgerHandle": "processes.handles",
    "LiveView": "report",
    "Metrics": "report",
    "PlainView": "report",
    "Summary": "report.summary",
    "busy_shares": "report.bottleneck",
    "check_inputs": "inputs",
    "dump_config": "config",
    "load_config": "config",
    "machine_devices": "cluster.placement",
    "make_view": "report",
    "ray_cluster": "cluster.ray_session",
    "read_lines": "report",
    "read_metrics": "report",
    "run_training": "pipeline",
    "write_demo": "demo",
}
"""The module of each public name. It is imported when the name is first used, because some import torch or Ray."""

__all__ = [
    "Config",
    "Interrupts",
    "LedgerHandle",
    "LiveView",
    "Metrics",
    "PlainView",
    "Summary",
    "busy_shares",
    "check_inputs",
    "dump_config",
    "load_config",
    "machine_devices",
    "make_view",
    "ray_cluster",
    "read_lines",
    "read_metrics",
    "run_training",
    "write_demo",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
