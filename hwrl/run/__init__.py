"""Training runs: ``hwrl train`` from its configuration to the trained model. Importing this package is cheap.

Read ``loop.py`` first: it is a whole run, on one page. It is called in the driver, the process of ``hwrl train``, and
calls everything else:

- :mod:`hwrl.run.fleet` starts, calls, watches and ends the other processes, with :mod:`hwrl.run.replicas` and
  :mod:`hwrl.run.monitor`. :mod:`hwrl.run.remote` is how one process calls another.
- The other processes: :mod:`hwrl.run.trainer`, :mod:`hwrl.run.replica` and :mod:`hwrl.run.ledger`.
  :mod:`hwrl.run.build` makes their parts from the configuration.
- :mod:`hwrl.run.progress` counts, saves and restores the finished steps; :mod:`hwrl.run.evaluation` evaluates.
- :mod:`hwrl.run.cluster` starts or joins Ray, and places the processes on devices.
- :mod:`hwrl.run.report` writes metrics and logs. :mod:`hwrl.run.interrupts` handles signals.
- Files in the run directory: :mod:`hwrl.run.run_directory` claims it, :mod:`hwrl.run.scaling` exchanges requests of
  ``hwrl scale`` there. :mod:`hwrl.run.inputs` checks the input files before the start, and :mod:`hwrl.run.identity`
  compares their hashes later.

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
    from hwrl.run.ledger import LedgerActor, start_ledger
    from hwrl.run.loop import run_training
    from hwrl.run.remote import Remote
    from hwrl.run.report import LiveView, Metrics, PlainView, make_view, read_lines, read_metrics
    from hwrl.run.report.bottleneck import busy_shares
    from hwrl.run.report.summary import Summary

_MODULE_OF = {
    "Config": "config",
    "Interrupts": "interrupts",
    "LedgerActor": "ledger",
    "LiveView": "report",
    "Metrics": "report",
    "PlainView": "report",
    "Remote": "remote",
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
    "run_training": "loop",
    "start_ledger": "ledger",
    "write_demo": "demo",
}
"""The module of each public name. It is imported when the name is first used, because some import torch or Ray."""

__all__ = [
    "Config",
    "Interrupts",
    "LedgerActor",
    "LiveView",
    "Metrics",
    "PlainView",
    "Remote",
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
    "start_ledger",
    "write_demo",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
