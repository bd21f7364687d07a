"""The driver's side of a run's processes: start them, call them, watch them, and replace the dead ones.

:mod:`~hwrl.run.fleet.fleet` combines :mod:`~hwrl.run.fleet.trainers`, :mod:`~hwrl.run.fleet.replicas`,
:mod:`~hwrl.run.fleet.run_ledger`, and :mod:`~hwrl.run.fleet.monitor` with the heartbeats and the log of long waits.
"""
