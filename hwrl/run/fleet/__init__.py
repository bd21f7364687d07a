"""The driver's side of a run's processes: start them, call them, watch them, and replace the dead ones.

:mod:`~hwrl.run.fleet.fleet` holds all processes. It is made of :mod:`~hwrl.run.fleet.trainers`,
:mod:`~hwrl.run.fleet.replicas` and :mod:`~hwrl.run.fleet.run_ledger`, and of :mod:`~hwrl.run.fleet.monitor` with
heartbeats and the log of long waits.
"""
