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
  compares their hashes later. :mod:`hwrl.run.fit` refuses a run that certainly does not fit its devices.

:mod:`hwrl.run.config` is the configuration. Without a run, :mod:`hwrl.run.demo` writes the demo's files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_face

if TYPE_CHECKING:
    from hwrl.run.cluster.nodes import ClusterNode as ClusterNode
    from hwrl.run.cluster.nodes import place_on_nodes as place_on_nodes
    from hwrl.run.cluster.placement import Machines as Machines
    from hwrl.run.cluster.placement import PlacementPlan as PlacementPlan
    from hwrl.run.cluster.placement import choose_senders as choose_senders
    from hwrl.run.cluster.placement import machine_devices as machine_devices
    from hwrl.run.cluster.placement import plan_placement as plan_placement
    from hwrl.run.cluster.ray_session import ray_cluster as ray_cluster
    from hwrl.run.config import EMBEDDED as EMBEDDED
    from hwrl.run.config import FSDP as FSDP
    from hwrl.run.config import Config as Config
    from hwrl.run.config import dump_config as dump_config
    from hwrl.run.config import load_config as load_config
    from hwrl.run.demo import write_demo as write_demo
    from hwrl.run.fit import gib as gib
    from hwrl.run.fit import needs as needs
    from hwrl.run.fit import plugin_memory as plugin_memory
    from hwrl.run.ledger import LedgerActor as LedgerActor
    from hwrl.run.ledger import start_ledger as start_ledger
    from hwrl.run.loop import run_training as run_training
    from hwrl.run.remote import Remote as Remote
    from hwrl.run.report import Metrics as Metrics
    from hwrl.run.report import PlainView as PlainView
    from hwrl.run.report import read_lines as read_lines
    from hwrl.run.report import read_metrics as read_metrics
    from hwrl.run.report.bottleneck import busy_shares as busy_shares
    from hwrl.run.report.records import AppendedFile as AppendedFile
    from hwrl.run.report.summary import Summary as Summary
    from hwrl.run.settings import critic_settings as critic_settings
    from hwrl.run.settings import engine_settings as engine_settings
    from hwrl.run.settings import make_ledger as make_ledger
    from hwrl.run.settings import reference_settings as reference_settings
    from hwrl.run.settings import rollout_settings as rollout_settings

__getattr__, __dir__, __all__ = lazy_face(__name__)
